"""Losses that compare a student with its teacher. Each is a sum over rows, for `step.backward(loss, weight)`.

A row is one sample, or one position of a sequence: all dims but the last one. `mask` is 1 for rows that count.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Relation = Tensor | tuple[Tensor, Tensor]


def soft_target_loss(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 2.0,
    indices: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the sum over rows of T^2 KL(softmax(teacher / T) || softmax(student / T)), in nats.

    Gradients of soft targets shrink with 1 / T^2. The factor keeps their ratio to those of hard targets
    (Hinton et al. 2015, arXiv 1503.02531, section 2).

    Args:
        student: logits [..., classes].
        teacher: logits [..., classes], without a graph.
        temperature: T. A higher one weights unlikely classes more.
        indices: the classes of the teacher's logits, int64 [..., k], if only the largest k are known, as from
            `logits.topk(k)`. The teacher's probabilities of the others count as 0.
        mask: [...], 1 for rows that count.
    """
    log_student = F.log_softmax(student.float() / temperature, dim=-1)
    log_teacher = F.log_softmax(teacher.detach().float() / temperature, dim=-1)
    if indices is not None:
        log_student = log_student.gather(-1, indices)
    return temperature**2 * _total(_divergence(log_teacher, log_student), mask)


def hidden_state_loss(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the sum over rows of the mean squared difference between hidden states (FitNets, arXiv 1412.6550).

    A student of another width needs a projection, which is trained with it: `nn.Linear(64, 128)`, say.

    Args:
        student: hidden states [..., channels], after the projection.
        teacher: hidden states [..., channels].
        mask: [...], 1 for rows that count.
    """
    return _total((student.float() - teacher.detach().float()).square().mean(-1), mask)


def relation_loss(
    student: Relation, teacher: Relation, *, heads: int, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Return the sum over positions of the divergence between attention distributions, as a mean over heads.

    A relation of states X is softmax(X X^T / sqrt(d)), for each of `heads` slices of d channels. Widths of student and
    teacher may differ, and so may their own numbers of heads (MiniLMv2, arXiv 2012.15828). A pair (queries, keys) gives
    softmax(Q K^T / sqrt(d)): the attention itself, if `heads` is the models' own number of heads (MiniLM, arXiv
    2002.10957).

    Args:
        student: queries, keys or values of all heads [batch, length, channels]; or a pair (queries, keys).
        teacher: the same of the teacher.
        heads: the number of slices; a divisor of both widths.
        causal: whether a position attends only to itself and to earlier ones.
        mask: [batch, length], 1 for positions that count. Others are not attended to.

    Raises:
        ValueError: a width is no multiple of `heads`.
    """
    ours, theirs = (_log_relation(side, heads, causal, mask) for side in (student, teacher))
    return _total(_divergence(theirs.detach(), ours).mean(1), mask)


def _log_relation(states: Relation, heads: int, causal: bool, mask: Tensor | None) -> Tensor:
    """Return the logarithms of relations: [batch, heads, length, length]."""
    queries, keys = (_slices(each, heads) for each in (states if isinstance(states, tuple) else (states, states)))
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if causal:
        allowed = allowed.tril()
    if mask is not None:  # a position attends to itself at least, so that no row is without a distribution
        itself = torch.eye(len(allowed), dtype=torch.bool, device=scores.device)
        allowed = allowed & (mask.bool()[:, None, None, :] | itself)
    return F.log_softmax(scores.masked_fill(~allowed, -math.inf), dim=-1)


def _slices(states: Tensor, heads: int) -> Tensor:
    """Divide the channels: [batch, length, channels] -> [batch, heads, length, channels / heads]."""
    if states.shape[-1] % heads:
        raise ValueError(f"{states.shape[-1]} channels cannot be divided into {heads} slices")
    return states.float().unflatten(-1, (heads, -1)).transpose(1, 2)


def _divergence(log_expected: Tensor, log_found: Tensor) -> Tensor:
    """Return KL(expected || found) of each row. A class that is impossible for both adds nothing."""
    terms = log_expected.exp() * (log_expected - log_found)
    return torch.where(log_expected == -math.inf, 0.0, terms).sum(-1)


def _total(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows.sum() if mask is None else (rows * mask).sum()

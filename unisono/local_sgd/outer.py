"""The outer step: update the model with the change of the sites' weights since the last synchronization.

    anchor    the weights of all sites after the last synchronization
    gradient  anchor - mean of the sites' weights
    average   anchor <- anchor - gradient, the mean itself          (local SGD: Stich, arXiv 1805.09767)
    nesterov  velocity <- momentum * velocity + gradient            (DiLoCo: Douillard et al., arXiv 2311.08105)
              anchor   <- anchor - lr * (gradient + momentum * velocity)

Then every site continues from the anchor. A model may be synchronized in fragments, one after the other, and the
numbers may be in transit while the sites train. The result is then late, and a site has already trained further. It
continues from half way between the result and its own weights (Streaming DiLoCo: Douillard et al., arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.local_sgd.site_transport import PendingExchange, chunk_of, together

MERGE_ALPHA = 0.5
"""The share of a site's own weights that remains when the numbers of a synchronization arrive late."""


class ModelFragment:
    """Some parameters that are synchronized after the same steps.

    anchors, velocities  for every parameter, in float32 at least; without momentum there are no velocities
    left                 residuals of quantization on this process's chunk, by row
    sent                 number of parameters sent last, which are the first ones; later ones are sent the next time
    due                  the number of steps after which the pending result is applied
    """

    def __init__(self, device: torch.device, lr: float, momentum: float) -> None:
        self.device, self.lr, self.momentum = device, lr, momentum
        self.names: list[str] = []
        self.params: list[torch.nn.Parameter] = []
        self.anchors: list[torch.Tensor] = []
        self.velocities: list[torch.Tensor] = []
        self.left: list[torch.Tensor] = []
        self.letters: PendingExchange | None = None
        self.arrived: tuple[list[list[float]], list[torch.Tensor]] | None = None
        self.sent = self.due = 0

    def add(self, name: str, p: torch.nn.Parameter, anchor: torch.Tensor, velocity: torch.Tensor | None) -> None:
        """Add a parameter, with its value at the last synchronization of the sites."""
        self.names.append(name)
        self.params.append(p)
        self.anchors.append(as_real(anchor).to(p.device, copy=True))
        if self.momentum:
            was = torch.zeros_like(self.anchors[-1]) if velocity is None else velocity.to(p.device)
            self.velocities.append(was)
        self.left.clear()  # the rows are longer now

    def named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return these tensors, one for each parameter or for the first ones, by name."""
        return dict(zip(self.names, tensors, strict=False))

    @property
    def sent_anchors(self) -> list[torch.Tensor]:
        """The anchors of the parameters that were sent last."""
        return self.anchors[: self.sent]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the rows."""
        return kinds(self.anchors)

    def pseudo_gradients(self) -> list[torch.Tensor]:
        """Return the rows to send, one for each dtype: anchors minus the weights of this site."""
        self.sent = len(self.params)
        return concatenate([a - as_real(p) for a, p in zip(self.anchors, self.params, strict=True)], self.device)

    def residuals(self, rows: Sequence[torch.Tensor], site: ProcessGroup) -> list[torch.Tensor]:
        """Return the residuals of quantization."""
        if not self.left:
            self.left += [torch.zeros_like(chunk_of(row, site)) for row in rows]
        return self.left

    def whole_left(self, site: ProcessGroup) -> list[torch.Tensor]:
        """Return the residuals of all processes of the site, padded to whole chunks. All of them call this."""
        return [together(chunk, site) for chunk in self.left]

    def step(self, gradient: Sequence[torch.Tensor], keep: float) -> None:
        """Run the outer step. `keep`: the share of this site's own weights that remains."""
        with torch.no_grad():
            ways = unflatten(gradient, self.sent_anchors)
            for v, g in zip(self.velocities, ways, strict=False):
                v.mul_(self.momentum).add_(g)
                g.add_(v, alpha=self.momentum)
            for p, a, g in zip(self.params, self.sent_anchors, ways, strict=False):
                a.sub_(g, alpha=self.lr)
                _numbers(p).lerp_(a.to(p.dtype.to_real()), 1.0 - keep) if keep else _numbers(p).copy_(a)


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide parameter numbers into `count` contiguous fragments, none empty, of about equal numbers of elements."""
    stretches: list[list[int]] = [[]]
    done = 0
    for number, size in enumerate(sizes):
        to_open = count - len(stretches)
        full = done + size / 2 > sum(sizes) * len(stretches) / count
        if stretches[-1] and to_open and (full or len(sizes) - number == to_open):
            stretches.append([])
        stretches[-1].append(number)
        done += size
    return stretches


def kinds(tensors: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Return the dtypes of tensors, each once, in the same order on every process."""
    return sorted({tensor.dtype for tensor in tensors}, key=str)


def concatenate(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Concatenate tensors to a row [elements] for each dtype, in the order of `kinds`."""
    return [
        torch.cat([t.reshape(-1).to(device) for t in tensors if t.dtype == dtype]).contiguous()
        for dtype in kinds(tensors)
    ]


def unflatten(rows: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split such rows into tensors with the shapes of `like`."""
    streams: Mapping[torch.dtype, list[torch.Tensor]] = {
        dtype: list(row.split([t.numel() for t in like if t.dtype == dtype]))
        for dtype, row in zip(kinds(like), rows, strict=True)
    }
    return [streams[t.dtype].pop(0).view(t.shape).to(t.device) for t in like]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a floating-point or complex tensor as real numbers, in float32 at least."""
    numbers = _numbers(tensor)
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as real numbers.

    `.data` has a version counter of its own, so no check takes the writes of a synchronization for those of the script.
    """
    return torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data

"""Train an agent to balance a pole on a cart, with proximal policy optimization (PPO).

    unisono run ppo --ranks 2                                           half a minute on two cores
    unisono copy ppo mine.py                                            then edit it and: unisono run mine.py

World    CartPole (Barto, Sutton and Anderson 1983) in torch, many carts at a time; an episode ends after 500 moves
Method   PPO (arXiv 1707.06347): in each step of the run the agent plays, then learns from its moves in several passes
Result   a mean return of 500, of at most 500, in 64 new episodes; a random agent gets about 22
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono

LONGEST = 500
"""Moves after which an episode ends in the evaluation."""


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 64  # carts that the agent plays with in each step of the run
    steps: int | None = 20
    lr: float = 3e-3  # learning rate at the beginning; it falls to 0
    clip: float | None = 0.5
    moves: int = 128  # moves of each cart in a step of the run
    spread: float = 2.0  # meters from the middle at which a cart starts at most; an evaluation starts in the middle
    passes: int = 4  # passes over the moves of a step
    parts: int = 4  # parts of the moves in a pass, with an update after each
    discount: float = 0.99  # of later rewards
    decay: float = 0.95  # lambda of the generalized advantage estimation
    ratio: float = 0.2  # change of a move's probability, as a part, above which the move has no gradient
    value_weight: float = 0.5  # weight of the loss of the values
    entropy_weight: float = 0.01  # weight of the entropy, which keeps the agent curious
    width: int = 64  # neurons in each hidden layer
    episodes: int = 64  # episodes of an evaluation

    def __post_init__(self) -> None:
        """Refuse parallelism that this model does not support."""
        self.parallel.refuse("The ppo recipe", "The network is tiny, and the agent calls it once for each move.")


class Moves(NamedTuple):
    """What a micro-batch of carts has played: one row for each move, [moves * carts, ...]."""

    states: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    falls: Tensor
    """Whether the episode ended with the move."""
    orders: Tensor
    """The order of rows in each pass: [passes, moves * carts]."""


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    policy = run.place(lambda: Policy(settings.width))
    # The agent plays with a copy, which stays as it is while the policy learns. If a process dies in the middle of a
    # step, others play its carts again, with the same moves.
    player = run.place(lambda: Policy(settings.width).requires_grad_(False))
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings.lr, eps=1e-5)
    updates = run.total_steps * settings.passes * settings.parts
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=updates)
    run.track(policy=policy, player=player, optimizer=optimizer, schedule=schedule)

    for step in run.steps(lambda numbers: play(player, len(numbers), run.device, settings)):
        player.load_state_dict(policy.state_dict())
        for number in range(settings.passes):
            for part in range(settings.parts):
                for moves in step.over(optimizer):
                    rows = moves.orders[number].tensor_split(settings.parts)[part]
                    step.backward(loss_sum(policy, moves, rows, settings), weight=len(rows))
                    step.add("falls", moves.falls.sum(), len(moves.falls))
                step.update(optimizer, schedule)
        run.log(loss=step.loss, falls=step.mean("falls"))
        if step.every(10):
            run.log(run.evaluate(policy, range(settings.episodes), mean_return, forward=play_episodes))

    result = run.evaluate(policy, range(settings.episodes), mean_return, forward=play_episodes)
    run.log(result)
    run.print(f"validation: mean return {result['mean_return']:.1f} of {settings.episodes} episodes, at most {LONGEST}")


def loss_sum(policy: nn.Module, moves: Moves, rows: Tensor, settings: Settings) -> Tensor:
    """Return the sum of PPO's loss over some of the moves."""
    logits, values = policy(moves.states[rows])
    every = F.log_softmax(logits, dim=1)
    ratio = (every.gather(1, moves.actions[rows, None])[:, 0] - moves.log_probs[rows]).exp()
    advantages = moves.advantages[rows]
    clipped = ratio.clamp(1 - settings.ratio, 1 + settings.ratio)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    entropy = -(every.exp() * every).sum(1)
    errors = (values - moves.returns[rows]).square() / 2
    return (settings.value_weight * errors - gain - settings.entropy_weight * entropy).sum()


@torch.no_grad()
def play(player: nn.Module, carts: int, device: torch.device, settings: Settings) -> Moves:
    """Play with some carts, each from a new start, and estimate the advantage of each move.

    Carts start at any place, so that the agent soon knows the ends of the track.

    The random numbers are torch's own. The run seeds them for each micro-batch, so no process changes a move.
    """
    states, actions, log_probs, values, falls = [], [], [], [], []
    state = start(carts, device, settings.spread)
    for _ in range(settings.moves):
        logits, value = player(state)
        every = F.log_softmax(logits, dim=1)
        action = torch.multinomial(every.exp(), 1)[:, 0]
        states.append(state)
        actions.append(action)
        log_probs.append(every.gather(1, action[:, None])[:, 0])
        values.append(value)
        state = push(state, action)
        falls.append(has_fallen(state))
        state = torch.where(falls[-1][:, None], start(carts, device, settings.spread), state)
    values.append(player(state)[1])  # the moves are not over: the value stands for the later ones

    advantages, advantage = [], torch.zeros(carts, device=device)
    for t in reversed(range(settings.moves)):  # generalized advantage estimation, arXiv 1506.02438; a reward is 1
        discount = settings.discount * (~falls[t])
        error = 1 + discount * values[t + 1] - values[t]
        advantage = error + discount * settings.decay * advantage
        advantages.append(advantage)
    estimate = torch.cat(advantages[::-1])
    rows = settings.moves * carts
    return Moves(
        states=torch.cat(states),
        actions=torch.cat(actions),
        log_probs=torch.cat(log_probs),
        advantages=(estimate - estimate.mean()) / (estimate.std() + 1e-8),
        returns=estimate + torch.cat(values[:-1]),
        falls=torch.cat(falls),
        orders=torch.stack([torch.randperm(rows, device=device) for _ in range(settings.passes)]),
    )


def play_episodes(policy: Callable[[Tensor], tuple[Tensor, Tensor]], numbers: Tensor) -> Tensor:
    """Play one episode for each number, with the most probable moves, and return how long each took: [episodes]."""
    state = start(len(numbers), numbers.device)
    alive = torch.ones(len(numbers), dtype=torch.bool, device=numbers.device)
    lengths = torch.zeros(len(numbers), device=numbers.device)
    for _ in range(LONGEST):  # as many calls of the policy on every process: it may be divided between them
        lengths += alive
        state = push(state, policy(state)[0].argmax(1))
        alive &= ~has_fallen(state)
    return lengths


def mean_return(lengths: Tensor, numbers: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the returns, and the number of episodes."""
    return lengths.sum(), len(numbers)


# -- the world: a cart on a track of 4.8 m, pushed to the left or to the right every 0.02 s, with a pole of 1 m


def start(carts: int, device: torch.device, spread: float = 0.05) -> Tensor:
    """Return the states of carts at the beginning, [carts, 4]: place, speed, angle of the pole, speed of the angle."""
    most = torch.tensor([spread, 0.05, 0.05, 0.05], device=device)
    return (2 * torch.rand(carts, 4, device=device) - 1) * most


def push(state: Tensor, action: Tensor) -> Tensor:
    """Push the carts with 10 N, to the left (0) or to the right (1), and return their states after 0.02 s."""
    place, speed, angle, turn = state.unbind(1)
    sin, cos = angle.sin(), angle.cos()
    pole, mass, half = 0.1, 1.1, 0.5  # kg of the pole, kg of pole and cart, m of half of the pole
    force = (20.0 * action - 10.0 + pole * half * turn.square() * sin) / mass
    spin = (9.8 * sin - cos * force) / (half * (4 / 3 - pole * cos.square() / mass))
    gain = force - pole * half * spin * cos / mass
    return torch.stack((place + 0.02 * speed, speed + 0.02 * gain, angle + 0.02 * turn, turn + 0.02 * spin), dim=1)


def has_fallen(state: Tensor) -> Tensor:
    """Return whether a cart has left its track, or its pole leans by more than 12 degrees."""
    return (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > math.radians(12))


class Policy(nn.Module):
    """Two networks: one for the probability of each action, one for the value of a state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor, self.critic = network(width, 2, gain=0.01), network(width, 1, gain=1.0)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Map states [n, 4] to logits of actions [n, 2] and values [n]."""
        return self.actor(states), self.critic(states)[:, 0]


def network(width: int, outputs: int, gain: float) -> nn.Sequential:
    """Make a network of two hidden layers, with orthogonal weights."""
    layers = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, outputs)
    for layer, scale in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


if __name__ == "__main__":
    unisono.main(main, Settings)

"""Returns, generalised advantage estimation and the clipped value loss, for training with a critic.

A masked token inside a response (tool output) is crossed without a decay step and gets no return of
its own; tokens after the last trained one take no part. So rewards [0, 0, 1], mask [1, 0, 1], gamma
0.5 give return 0.5 at token 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Sum of later rewards of one sequence, each decayed by gamma per trained token between.

    Args:
        rewards: [R] per-token rewards of one response, any value at masked places (they are taken
            as 0).
        mask: [R], nonzero where trained.
        gamma: decay per trained token.
    Returns:
        [R] float32, 0 at masked places.
    """
    places = torch.nonzero(mask).flatten()
    result = torch.zeros(rewards.shape, dtype=torch.float32)
    running = 0.0
    for place in reversed(places.tolist()):
        running = float(rewards[place]) + gamma * running
        result[place] = running
    return result


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE over the trained tokens of one sequence; the value after the last one is 0.

    Args:
        rewards, values: [R]; values without gradient.
        mask: [R], nonzero where trained.
    Returns:
        advantages and returns (advantages + values), [R] float32 each, 0 at masked places.
    Source: arXiv:1506.02438.
    """
    places = torch.nonzero(mask).flatten().tolist()
    advantages = torch.zeros(rewards.shape, dtype=torch.float32)
    following, running = 0.0, 0.0
    for place in reversed(places):
        value = float(values[place])
        running = float(rewards[place]) + gamma * following - value + gamma * lam * running
        advantages[place] = running
        following = value
    trained = mask != 0
    returns = torch.where(trained, advantages + values.float(), torch.zeros_like(advantages))
    return advantages, returns


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """max((v - R)^2, (v clipped to old +- clip - R)^2) per token, without a factor 1/2.

    Args:
        values: [tokens] with gradient; old_values, returns: [tokens]; mask: [tokens]; clip: in
            reward units.
    Returns:
        loss [tokens], 0 at masked places, and as 0/1 [tokens] where the clip decided.
    """
    trained = mask != 0
    zero = torch.zeros((), dtype=torch.float32, device=values.device)
    v, old, target = (
        torch.where(trained, t.float(), zero)
        for t in (values, old_values.detach(), returns.detach())
    )
    plain = (v - target) ** 2
    limited = (old + torch.clamp(v - old, -clip, clip) - target) ** 2
    return torch.maximum(plain, limited), (limited > plain).float().detach()

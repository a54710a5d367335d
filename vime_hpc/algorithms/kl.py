"""Per-token estimators of KL(policy || base) from the logprob of the sampled token.

With d = logprob - base_logprob, the token drawn from the policy:
    k1       d                   unbiased, any sign; as a loss its gradient has mean zero, so it
    pulls nowhere k2       d^2 / 2             biased, >= 0
    k3       exp(-d) - 1 + d     unbiased, >= 0
    low_var  k3, clamped to 10   bounded; its gradient vanishes above the bound
Source: J. Schulman, "Approximating KL divergence", 2020; low_var as in verl and slime.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""exp(20) = 4.9e8: far outside any useful ratio, far inside float32."""
LOW_VAR_BOUND = 10.0


def kl_per_token(estimator: str, logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """The estimator's value per token.

    Args:
        estimator: k1, k2, k3 or low_var.
        logprobs: [tokens] of the policy, natural log; carries the gradient.
        base_logprobs: [tokens] of the reference; no gradient.
    Returns:
        [tokens] nats; >= 0 except for k1, and finite for finite inputs.
    Raises:
        ValueError: unknown estimator.
    """
    d = (logprobs - base_logprobs.detach()).float()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        return _k3(d)
    if estimator == "low_var":
        return torch.clamp(_k3(d), max=LOW_VAR_BOUND)
    raise ValueError(f'KL estimator "{estimator}" is unknown; there are k1, k2, k3 and low_var')


def _k3(d: Tensor) -> Tensor:
    # expm1 keeps small d exact: exp(-d) - 1 + d in float32 goes below zero for |d| < 1e-4. The
    # clamp at 0 removes the last ulp; the bound on the exponent keeps a base that is far likelier
    # finite.
    value = torch.expm1(torch.clamp(-d, max=LOG_RATIO_BOUND)) + d
    # Where the exponent is bounded, -d > 20, the line continues the curve: value stays >= 0 and
    # keeps its slope in d.
    over = -d > LOG_RATIO_BOUND
    slope = torch.exp(torch.tensor(LOG_RATIO_BOUND, dtype=d.dtype, device=d.device))
    linear = slope * (-d - LOG_RATIO_BOUND + 1.0) - 1.0 + d
    return torch.clamp(torch.where(over, linear, value), min=0.0)

"""Make megatron-core's DistributedOptimizer load its state with torch's AdamW (no
TransformerEngine, no apex).

Bugs of megatron-core 0.16.1 and 0.19.2 on that path, on any device, each seen when resuming:
- `fully_reshardable` load: KeyError 'step', and an in-place copy into a view of a leaf that
  requires grad;
- after the load all parameters share ONE `step` tensor, so Adam's bias correction counts every
  parameter's update (resumed losses 4.632, 4.298 instead of 4.597, 4.272, without any message);
- a fresh optimizer has no state yet (torch creates it lazily), so the load request itself fails.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class TorchAdamDistributedOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """DistributedOptimizer whose inner optimizer is torch.optim.AdamW."""

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(
        self, model_param: Any, tensors: dict[str, Any]
    ) -> None:
        group, index = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][index]
        main.copy_(tensors["param"])
        for key, value in self.optimizer.state[main].items():
            if key != "step":
                value.copy_(tensors[key])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()


def each(optimizer: Any) -> list[Any]:
    """The optimizers inside a chained one, or the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def adopt(optimizer: Any) -> None:
    """Give every DistributedOptimizer inside the repaired class; call right after
    get_megatron_optimizer().
    """
    for one in each(optimizer):
        if type(one) is DistributedOptimizer:
            one.__class__ = TorchAdamDistributedOptimizer


def fuse(optimizer: Any) -> None:
    """Have torch's AdamW update all parameters of a type in one kernel (CUDA): Megatron builds it without that switch."""
    for one in each(optimizer):
        for group in one.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


def start_moments(optimizer: Any) -> None:
    """Create Adam's moments (zeros) and step counters (zero) now, without changing a weight.

    torch makes them at the first update; a checkpoint saved before that (every reward equal so far) would lack them, and
    one cannot be loaded into an optimizer that lacks them.
    """
    for one in each(optimizer):
        inner = one.optimizer
        if not inner.param_groups:
            continue
        kept = [(group["lr"], group["weight_decay"]) for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
        inner.step()
        inner.zero_grad(set_to_none=True)
        for state in inner.state.values():
            state["step"].zero_()
        for group, (lr, weight_decay) in zip(inner.param_groups, kept, strict=True):
            group["lr"], group["weight_decay"] = lr, weight_decay

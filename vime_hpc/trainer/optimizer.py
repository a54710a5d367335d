"""Megatron-Core's Adam and learning-rate schedule from the [optimizer] section."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from vime_hpc.config.algorithm import OptimizerConfig, check_schedule
from vime_hpc.config.parts import TrainerConfig
from vime_hpc.trainer import torch_adam
from vime_hpc.trainer.model import TrainedModel


def build_optimizer(model: TrainedModel, config: OptimizerConfig, trainer: TrainerConfig) -> Any:
    """AdamW over the model's parameters; bfloat16 weights get float32 masters. Collective over the
    trainer ranks.
    """
    bf16 = model.config.params_dtype is torch.bfloat16
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            # infinity instead of "off": megatron then still computes the norm we report
            clip_grad=config.clip_grad_norm or float("inf"),
            bf16=bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=trainer.distributed_optimizer,
        ),
        [model.wrapped],
    )
    torch_adam.adopt(optimizer)
    if model.device.type == "cuda":
        torch_adam.fuse(optimizer)
    torch_adam.start_moments(optimizer)
    return optimizer


def build_schedule(
    optimizer: Any, config: OptimizerConfig, *, num_updates: int
) -> OptimizerParamScheduler:
    """Warm-up and decay, one step an optimizer update, taken BEFORE the update (so the first one
    has a rate above 0).

    Args:
        num_updates: optimizer updates of the whole run; the rate would be min_lr at the one after
            the last.
    """
    check_schedule(config, num_updates)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_updates,
        lr_decay_steps=num_updates + 1,
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=num_updates + 1,
        wd_incr_style="constant",
        # Of a checkpoint only the count of updates: run.num_steps may have been raised, a replay may change the rate.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )

"""The trainer of a run from its configuration: what a trainer role calls after torch.distributed is
up.
"""

from __future__ import annotations

from vime_hpc.config.tree import RunConfig
from vime_hpc.trainer.model import build_model
from vime_hpc.trainer.step import MegatronTrainer


def build_trainer(config: RunConfig) -> MegatronTrainer:
    """Policy, reference (where the loss has a KL term), optimizer and schedule. Collective over the
    trainer ranks.

    `cuda_on_cpu.install()` must have been called before this module was imported, torch.distributed
    be initialised over the trainer ranks with timeout trainer.timeout_s, and on CUDA
    `torch.cuda.set_device(local_rank)` done.
    """
    algorithm = config.algorithm
    model = build_model(config.model, config.trainer, seed=config.run.seed)
    needs_reference = algorithm.loss == "policy" and algorithm.kl_loss_coef > 0
    reference = build_model(config.model, config.trainer, frozen=True) if needs_reference else None
    return MegatronTrainer(
        model,
        algorithm=algorithm,
        optimizer=config.optimizer,
        trainer=config.trainer,
        temperature=config.rollout.temperature,
        num_steps=config.run.num_steps,
        reference=reference,
    )

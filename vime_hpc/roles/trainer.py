"""The trainer role: builds what trainer_loop works with on one Megatron-Core rank, and runs it."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from vime_hpc.trainer import cuda_on_cpu

cuda_on_cpu.install()  # before the first import of megatron; does nothing where CUDA is

from vime_hpc.cluster.devices import own_gpus  # noqa: E402
from vime_hpc.cluster.groups import any_rank, start_trainer_group  # noqa: E402
from vime_hpc.cluster.rank import Role, layout  # noqa: E402
from vime_hpc.cluster.rendezvous import Rendezvous  # noqa: E402
from vime_hpc.cluster.stop import AgreedStop  # noqa: E402
from vime_hpc.config.parts import WeightSyncConfig  # noqa: E402
from vime_hpc.config.tree import RunConfig  # noqa: E402
from vime_hpc.errors import WeightsMismatchError  # noqa: E402
from vime_hpc.launch.finished_buffer import refuse_unfinished, training_buffer  # noqa: E402
from vime_hpc.launch.run_directory import lacks_export  # noqa: E402
from vime_hpc.loop import TrainerSide, trainer_loop  # noqa: E402
from vime_hpc.protocols import BatchSource, Metrics, StepBatch  # noqa: E402
from vime_hpc.roles.batches import SharedBatches  # noqa: E402
from vime_hpc.roles.context import RoleContext  # noqa: E402
from vime_hpc.roles.finished import FilteredBatches, later_filters  # noqa: E402
from vime_hpc.roles.meeting import meeting  # noqa: E402
from vime_hpc.roles.probe import ProbedPublisher  # noqa: E402
from vime_hpc.roles.publishing import BridgePublisher, NoPublisher, version_store  # noqa: E402
from vime_hpc.roles.step_log import StepLog  # noqa: E402
from vime_hpc.rollout.filters import resolve_filters  # noqa: E402
from vime_hpc.trainer.build import build_trainer  # noqa: E402
from vime_hpc.trainer.checkpoint import MegatronCheckpoints  # noqa: E402
from vime_hpc.trainer.export import WeightExporter  # noqa: E402
from vime_hpc.trainer.step import MegatronTrainer  # noqa: E402

log = logging.getLogger(__name__)
MISMATCH = "train/train_rollout_logprob_abs_diff"


def run_trainer(context: RoleContext) -> None:
    """One trainer rank, from the meeting to the exported policy."""
    config, rank = context.config, context.rank
    torch.set_num_threads(config.trainer.num_threads)
    backend = _backend(config)
    if backend != "gloo":
        torch.cuda.set_device(own_gpus(config, rank, torch.cuda.device_count())[0])
    with meeting(context) as rendezvous:
        start_trainer_group(
            rendezvous.prefixed("trainer"),
            rank.role_rank,
            rank.role_size,
            backend,
            config.trainer.timeout_s,
        )
        try:
            _train(context, rendezvous)
        finally:
            dist.destroy_process_group()


def _train(context: RoleContext, rendezvous: Rendezvous) -> None:
    config = context.config
    alone = config.run.mode == "train_only"
    if alone:
        refuse_unfinished(config, context.paths.root)
    trainer = build_trainer(config)
    exporter = WeightExporter(trainer.model)
    stop = AgreedStop(context.warning, rendezvous, any_rank)
    if Role.ROLLOUT in dict(layout(config)):
        rendezvous.wait(
            "buffer_attempt",
            timeout_s=config.run.startup_timeout_s,
            who="rollout-0",
            phase="opening the buffer",
        )
    weights = _publisher(trainer, exporter, context, rendezvous)
    batches: BatchSource = SharedBatches(
        training_buffer(config.run, context.paths.root),
        rendezvous,
        lambda: context.warning.is_set() or rendezvous.has("stop"),
        config.run.wait_timeout_s,
        weights,
    )
    if names := later_filters(config):
        batches = FilteredBatches(batches, resolve_filters(names))
    side = TrainerSide(
        num_steps=config.run.end_step,
        buffer=batches,
        # The engines of another run, or none: what the samples came from is not what this trainer holds.
        trainer=trainer if alone else VerifiedTrainer(trainer, config.weights),
        weights=weights,
        checkpoint=MegatronCheckpoints(
            context.paths.checkpoints, trainer, config.checkpoint, num_steps=config.run.end_step
        ),
        stop=stop,
        log=StepLog(context),
        only_to_end=lacks_export(context.paths, config),
    )
    try:
        trainer_loop(side)
    finally:
        rendezvous.put("trainer_stopped", True)
    if config.checkpoint.export_hf:
        exporter.save_hf(context.paths.export)


def _publisher(
    trainer: MegatronTrainer, exporter: WeightExporter, context: RoleContext, rendezvous: Rendezvous
) -> ProbedPublisher | NoPublisher:
    config = context.config
    if Role.ENGINE not in dict(layout(config)):
        return NoPublisher()
    versions = version_store(config, context.paths.weights, context.rank.attempt)
    publisher = BridgePublisher(
        exporter, config, rendezvous, trainer.model.device, versions, any_rank
    )
    return ProbedPublisher(publisher, trainer.logprobs, config, rendezvous)


def _backend(config: RunConfig) -> str:
    if config.trainer.device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    return "cpu:gloo,cuda:nccl"


class VerifiedTrainer:
    """protocols.Trainer that stops the run when the engine does not serve the trainer's weights.

    Digests prove what arrived, not what the engine computes with: a layer that keeps a stale copy of its weight is seen
    only in the logprobs. On-policy samples are a probe of thousands of tokens that costs nothing more.
    """

    def __init__(self, trainer: MegatronTrainer, weights: WeightSyncConfig) -> None:
        self._trainer, self._weights = trainer, weights

    def step(self, batch: StepBatch) -> Metrics:
        metrics = self._trainer.step(batch)
        interval, found = self._weights.verify_interval, metrics.get(MISMATCH)
        on_policy = bool((batch.table.weight_version == batch.step).all())
        if found is None or not interval or batch.step % interval or not on_policy:
            return metrics
        if not found <= self._weights.verify_tolerance:
            raise WeightsMismatchError(
                f"step {batch.step}: the engine's logprobs of its own samples differ from the trainer's by {found:.3g} on "
                f"average, weights.verify_tolerance is {self._weights.verify_tolerance:g}. Either the engine computes with "
                f"other weights than version {batch.step}, or the two sides' numerics differ by more than that: compare "
                f"model.dtype, [vllm] dtype and attention options, then set --weights.verify_tolerance"
            )
        return metrics

"""One trainer step: advantages, plan, old and reference logprobs, forward and backward, optimizer,
metrics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vime_hpc.algorithms.policy_loss import policy_loss, sft_loss
from vime_hpc.config.algorithm import AlgorithmConfig, OptimizerConfig
from vime_hpc.config.parts import TrainerConfig
from vime_hpc.errors import ConfigError, VimeError
from vime_hpc.protocols import Metrics, StepBatch
from vime_hpc.trainer.forward import PackedForward
from vime_hpc.trainer.metrics import StepSums
from vime_hpc.trainer.microbatch import Microbatch, pack
from vime_hpc.trainer.model import TrainedModel
from vime_hpc.trainer.optimizer import build_optimizer, build_schedule
from vime_hpc.trainer.packing import plan_update
from vime_hpc.trainer.shares import Share, step_shares
from vime_hpc.types import FloatArray, Sample


@dataclass(frozen=True)
class Update:
    """One optimizer update: this rank's microbatches, and what every sample counts for."""

    microbatches: list[Microbatch]
    advantages: Tensor
    """[samples of the step] float32."""
    weights: Tensor
    """[samples of the step] float64: factor of every trained token of the sample in this update's
    loss.
    """
    old: list[Tensor] | None = None
    """Per microbatch [R]; None = take the training forward's own, before the update there is no
    other policy.
    """
    ref: list[Tensor] | None = None

    @property
    def has_signal(self) -> bool:
        return bool((self.weights > 0).any())


class MegatronTrainer:
    """The policy, its optimizer and its schedule; implements protocols.Trainer. Every method is
    collective.
    """

    def __init__(
        self,
        model: TrainedModel,
        *,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        temperature: float,
        num_steps: int,
        reference: TrainedModel | None = None,
    ) -> None:
        """
        Args:
            model: from build_model.
            temperature: the sampling temperature (rollout.temperature); not used for algorithm.loss
                = "sft".
            num_steps: steps of the whole run (run.num_steps), for the learning-rate schedule.
            reference: from build_model(frozen=True); needed exactly where algorithm.kl_loss_coef >
                0.
        """
        needs_reference = algorithm.loss == "policy" and algorithm.kl_loss_coef > 0
        if needs_reference and reference is None:
            raise ConfigError(
                f"algorithm.kl_loss_coef = {algorithm.kl_loss_coef} needs a reference model"
            )
        self.model = model
        self.reference = reference if needs_reference else None
        self._algorithm = algorithm
        self._trainer = trainer
        self._sft = algorithm.loss == "sft"
        scale = 1.0 if self._sft else temperature
        self._forward = PackedForward(
            model, temperature=scale, chunk_tokens=trainer.logit_chunk_tokens
        )
        self._ref_forward = (
            PackedForward(
                self.reference, temperature=scale, chunk_tokens=trainer.logit_chunk_tokens
            )
            if self.reference
            else None
        )
        self.optimizer = build_optimizer(model, optimizer, trainer)
        self.scheduler = build_schedule(
            self.optimizer, optimizer, num_updates=num_steps * algorithm.updates_per_step
        )

    def step(self, batch: StepBatch) -> Metrics:
        """Train on the batch.

        Raises:
            VimeError: no trainable token at all, or a loss or gradient that is not finite (before
                any weight changed).
        """
        started = time.perf_counter()
        self._refuse_empty(batch)
        self._renew_reference(batch.step)
        updates = self._updates(batch)
        metrics: Metrics = {}
        updates = self._with_old(updates, metrics)
        updates = self._with_reference(updates, metrics)
        train_started = time.perf_counter()
        sums = StepSums(self.model.device, self.model.ranks)
        lrs, norms, skipped = [], [], 0
        for index, update in enumerate(updates):
            self.scheduler.step(1)
            lrs.append(float(self.optimizer.param_groups[0]["lr"]))
            if update.has_signal:
                norms.append(self._train(batch.step, update, sums, first=index == 0))
            else:
                skipped += 1
                self._watch_only(update, sums, first=index == 0)
        now = time.perf_counter()
        metrics |= sums.means(num_updates=max(1, len(updates) - skipped), sft=self._sft)
        elapsed = now - started
        metrics |= {
            "train/grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "train/lr": lrs[-1],
            "train/skipped_update": float(skipped),
            "train/num_microbatches": float(sum(len(u.microbatches) for u in updates)),
            "train/num_samples": float(len(batch.table)),
            "train/samples_without_signal": float(
                (torch.stack([u.weights for u in updates]).sum(0) == 0).sum()
            ),
            "perf/actor_train_time": now - train_started,
            "perf/train_time": elapsed,
            "perf/train_tokens_per_rank_per_sec": float(
                (batch.table.prompt_length + batch.table.response_length).sum()
            )
            / elapsed
            / dist.get_world_size(),
        }
        return metrics

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """[R] float32 logprobs of each sample's response tokens under the present weights, on every
        rank.
        """
        lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
        if not len(samples):
            return []
        plan = plan_update(
            lengths, None, self.model.ranks.dp_size, self._trainer.max_tokens_per_microbatch
        )
        mine = [
            self._pack(rows, [samples[row] for row in rows])
            for rows in plan[self.model.ranks.dp_rank]
        ]
        results = self._forward.logprobs(mine)
        starts = np.concatenate([[0], np.cumsum([sample.response_length for sample in samples])])
        flat = torch.zeros(int(starts[-1]), dtype=torch.float32, device=self.model.device)
        if self.model.ranks.reports:
            for microbatch, values in zip(mine, results, strict=True):
                place = 0
                for row, length in zip(microbatch.rows, microbatch.response_lengths, strict=True):
                    flat[int(starts[row]) : int(starts[row + 1])] = values[place : place + length]
                    place += length
        dist.all_reduce(flat)  # each place is filled by one rank, zero elsewhere
        return np.split(flat.cpu().numpy(), starts[1:-1])

    def _renew_reference(self, step: int) -> None:
        interval = self._algorithm.ref_update_interval
        if self.reference and interval and step and step % interval == 0:
            self.reference.copy_weights_from(self.model)

    # --- preparing ---------------------------------------------------------------------------------

    def _refuse_empty(self, batch: StepBatch) -> None:
        if not int(batch.table.mask_sum.sum()):
            where = getattr(batch, "path", None)
            raise VimeError(
                f"step {batch.step}{f' ({where})' if where else ''}: 0 trainable tokens in {len(batch.table)} samples; "
                "expected at least one response token with loss_mask 1. Responses are empty or masked out altogether: "
                f"vime-hpc buffer show RUN --step {batch.step}"
            )

    def _updates(self, batch: StepBatch) -> list[Update]:
        return [self._load(batch, share) for share in step_shares(batch.table, self._algorithm)]

    def _load(self, batch: StepBatch, share: Share) -> Update:
        """This rank's microbatches of an update."""
        ranks, limit = self.model.ranks, self._trainer.max_tokens_per_microbatch
        mine = share.plan(batch.table, ranks.dp_size, limit)[ranks.dp_rank]
        microbatches = [self._pack(part, batch.read(part) if part else []) for part in mine]
        device = self.model.device
        return Update(microbatches, share.advantages.to(device), share.weights.to(device))

    def _pack(self, rows: Sequence[int], samples: Sequence[Sample]) -> Microbatch:
        config = self.model.config
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return pack(rows, samples, self.model.device, multiple=multiple)

    def _with_old(self, updates: list[Update], metrics: Metrics) -> list[Update]:
        """Logprobs before the first update, where the first update's own forward does not give them
        already.
        """
        cfg = self._algorithm
        if self._sft or (len(updates) == 1 and not cfg.use_rollout_logprobs):
            return updates
        if cfg.use_rollout_logprobs:
            return [
                Update(
                    u.microbatches,
                    u.advantages,
                    u.weights,
                    [m.rollout_logprobs for m in u.microbatches],
                )
                for u in updates
            ]
        started = time.perf_counter()
        result = [
            Update(u.microbatches, u.advantages, u.weights, self._forward.logprobs(u.microbatches))
            for u in updates
        ]
        metrics["perf/log_probs_time"] = time.perf_counter() - started
        return result

    def _with_reference(self, updates: list[Update], metrics: Metrics) -> list[Update]:
        if self._ref_forward is None:
            return updates
        started = time.perf_counter()
        result = [
            Update(
                u.microbatches,
                u.advantages,
                u.weights,
                u.old,
                self._ref_forward.logprobs(u.microbatches),
            )
            for u in updates
        ]
        metrics["perf/ref_log_probs_time"] = time.perf_counter() - started
        return result

    # --- computing ---------------------------------------------------------------------------------

    def _train(self, step: int, update: Update, sums: StepSums, *, first: bool) -> float:
        """One optimizer update; returns the gradient norm before clipping."""

        def loss(index: int, microbatch: Microbatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
            return self._loss(update, index, microbatch, logprobs, entropy, sums, first=first)

        self.model.wrapped.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        self._forward.backward(update.microbatches, loss)
        total = sums.reduce()
        if not math.isfinite(total):
            raise VimeError(
                f"step {step}: the loss is {total}; no weight was changed. Look at train/ppo_kl and "
                "train/train_rollout_logprob_abs_diff of the steps before, and lower optimizer.lr"
            )
        _, norm, _ = self.optimizer.step()
        if not math.isfinite(norm):
            raise VimeError(
                f"step {step}: the gradient norm is {norm}, so the weights in memory are spoiled; nothing of "
                "this step was saved. Resume from the last checkpoint with a lower optimizer.lr"
            )
        return float(norm)

    def _watch_only(self, update: Update, sums: StepSums, *, first: bool) -> None:
        """No sample has a gradient: only compare trainer and engine logprobs, so that the check of
        weights goes on.
        """
        if first and not self._sft:
            logprobs = self._forward.logprobs(update.microbatches)
            for microbatch, values in zip(update.microbatches, logprobs, strict=False):
                sums.compare(values, microbatch.rollout_logprobs, microbatch.mask)
        sums.reduce()

    def _loss(
        self,
        update: Update,
        index: int,
        microbatch: Microbatch,
        logprobs: Tensor,
        entropy: Tensor,
        sums: StepSums,
        *,
        first: bool,
    ) -> Tensor:
        rows = torch.tensor(microbatch.rows, dtype=torch.int64, device=logprobs.device)
        weights = update.weights[rows][microbatch.segments] * microbatch.mask
        if self._sft:
            result = sft_loss(logprobs, microbatch.mask)
        else:
            old = update.old[index] if update.old is not None else logprobs.detach()
            result = policy_loss(
                logprobs,
                old,
                update.advantages[rows][microbatch.segments],
                microbatch.mask,
                config=self._algorithm,
                rollout_logprobs=microbatch.rollout_logprobs,
                ref_logprobs=update.ref[index] if update.ref else None,
                entropy=entropy,
                segment_ids=microbatch.segments,
            )
            recomputed = update.old is not None and not self._algorithm.use_rollout_logprobs
            if recomputed or first:  # the trainer's own logprobs before this step's first update
                sums.compare(
                    old if recomputed else logprobs.detach(),
                    microbatch.rollout_logprobs,
                    microbatch.mask,
                )
        # A token without weight adds an exact 0, whatever its own loss: NaN * 0 would be NaN.
        loss = torch.where(weights > 0, result.loss * weights, 0.0).sum()
        sums.add(loss.detach(), result.metrics, weights, microbatch.mask, entropy.detach())
        return loss.float()

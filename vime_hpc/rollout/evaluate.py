"""Held-out prompts through the engine and the verifier; results in RUN/eval.

Sampling seeds depend on the run seed, the prompt and the rollout only, so two versions are compared
on the same draws.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vime_hpc.config.plugin import load_plugin
from vime_hpc.config.rollout import EvalConfig, RolloutConfig
from vime_hpc.errors import EngineError, VimeError
from vime_hpc.protocols import EngineClient, GenerateFunction, Metrics
from vime_hpc.rollout.event_loop import CoroutineRunner
from vime_hpc.rollout.generate import AskAgain, BoundClient, Sampling, check_samples, failed_sample
from vime_hpc.rollout.rewards.runner import RewardRunner
from vime_hpc.rollout.seeds import request_seed
from vime_hpc.rollout.source import PromptSet
from vime_hpc.types import GroupRequest, Prompt, Sample, Status

log = logging.getLogger(__name__)

SOLVED = 1.0
"""A rollout with at least this reward has solved its prompt (pass@k)."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What evaluation needs of the configuration."""

    eval: EvalConfig
    rollout: RolloutConfig
    run_seed: int
    run_dir: Path


class EngineEvaluator:
    """A protocols.Evaluator."""

    def __init__(self, options: EvalOptions, *, prompts: PromptSet, client: EngineClient, rewards: RewardRunner,
                 decode: Callable[[Sequence[int]], str], runner: CoroutineRunner,
                 on_metrics: Callable[[int, Metrics], None] | None = None,
                 ask_again: AskAgain | None = None) -> None:  # fmt: skip
        """
        Args:
            ask_again: as RolloutScheduler's.
        """
        self._ask_again = ask_again
        self._options, self._client, self._rewards = options, client, rewards
        self._prompts = prompts.prompts[: options.eval.num_prompts]
        self._decode, self._runner, self._on_metrics = decode, runner, on_metrics
        self._generate: GenerateFunction = load_plugin(
            options.rollout.generate, option="rollout.generate"
        )

    def evaluate_if_due(self, version: int, *, last: bool = False) -> None:
        """Before the first step, every eval.interval versions and after the last; what RUN/eval has
        is not done again.
        """
        interval = self._options.eval.interval
        due = version == 0 or last or (interval > 0 and version % interval == 0)
        if due and not self._path(version).exists():
            self.evaluate(version)

    def evaluate(self, version: int) -> Metrics:
        """Evaluate now, write RUN/eval/step-NNNNNN.json, append to RUN/eval/metrics.jsonl, and
        return the metrics.

        Raises:
            VimeError: no rollout at all could be graded.
        """
        started = time.monotonic()
        samples = self._runner.run(self._all(version))
        metrics = eval_metrics(samples, self._options.eval.group_size)
        metrics["eval/time"] = time.monotonic() - started
        if "eval/reward" not in metrics:
            causes = sorted({s.reward_cause for group in samples for s in group})[:3]
            raise VimeError(
                f"evaluation of version {version}: no rollout could be graded: {causes}"
            )
        self._write(version, samples, metrics)
        log.info(
            "evaluation of version %d: reward %.4f over %d prompts",
            version,
            metrics["eval/reward"],
            len(samples),
        )
        if self._on_metrics is not None:
            self._on_metrics(version, metrics)
        return metrics

    async def _all(self, version: int) -> list[list[Sample]]:
        limit = asyncio.Semaphore(self._options.rollout.concurrency)
        size = self._options.eval.group_size
        tasks = [
            asyncio.create_task(self._one(prompt, index, version, limit))
            for prompt in self._prompts
            for index in range(size)
        ]
        try:
            graded = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [graded[i : i + size] for i in range(0, len(graded), size)]

    async def _one(
        self, prompt: Prompt, index: int, version: int, limit: asyncio.Semaphore
    ) -> Sample:
        options, rollout = self._options.eval, self._options.rollout
        request = GroupRequest(prompt.prompt_id, prompt, options.group_size)

        def seed_of_turn(turn: int) -> int:
            return request_seed(self._options.run_seed, step=0, group_id=prompt.prompt_id, index_in_group=index,
                                turn=turn, purpose="eval")  # fmt: skip

        sampling = Sampling(options.max_response_tokens or rollout.max_response_tokens, options.temperature,
                            options.top_p, -1, rollout.request_timeout_s)  # fmt: skip
        client = BoundClient(
            self._client,
            sampling,
            limit,
            seed_of_turn,
            self._decode,
            lambda: version,
            self._ask_again,
        )
        cause = ""
        for _ in range(rollout.max_attempts):
            try:
                samples = await self._generate(request, index, client, rollout.generate_table)
                checked = check_samples(samples, request, index)
            except (EngineError, TimeoutError, OSError) as error:
                cause = f"{type(error).__name__}: {error}"
                continue
            if checked[-1].status is not Status.ABORTED:
                return (await self._rewards.grade_rollout(checked, prompt))[-1]
            cause = "aborted"
        return failed_sample(request, index, cause=cause, version=version)

    def _path(self, version: int) -> Path:
        return self._options.run_dir / "eval" / f"step-{version:06d}.json"

    def _write(
        self, version: int, groups: Sequence[Sequence[Sample]], metrics: Mapping[str, float]
    ) -> None:
        path = self._path(version)
        path.parent.mkdir(parents=True, exist_ok=True)
        options = self._options.eval
        record = {
            "step": version,
            "weight_version": version,
            "num_prompts": len(groups),
            "options": options.model_dump(),
            "metrics": dict(metrics),
            "samples": [_row(s) for group in groups for s in group],
        }
        _write_atomically(path, json.dumps(record, indent=1, default=str))
        line = json.dumps({"step": version, **metrics})
        with (path.parent / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")


def eval_metrics(groups: Sequence[Sequence[Sample]], group_size: int) -> Metrics:
    """eval/reward (mean over usable rollouts), eval/pass@k for powers of two, lengths, truncated
    and unusable shares.

    Args:
        groups: the graded rollouts of each prompt.
        group_size: rollouts per prompt; k goes up to it.
    """
    samples = [s for group in groups for s in group]
    rewards = [s.reward for s in samples if s.reward is not None]
    lengths = [s.response_length for s in samples]
    metrics: Metrics = {
        "eval/num_prompts": float(len(groups)),
        "eval/response_lengths_mean": float(np.mean(lengths)),
        "eval/response_lengths_max": float(max(lengths)),
        "eval/truncated_ratio": sum(s.status is Status.TRUNCATED for s in samples) / len(samples),
        "eval/unusable_share": 1 - len(rewards) / len(samples),
    }
    if not rewards:
        return metrics
    metrics["eval/reward"] = float(np.mean(rewards))
    k = 1
    while k <= group_size:
        chances = [pass_at_k([s.reward for s in group], k) for group in groups]
        known = [c for c in chances if c is not None]
        if known:
            metrics[f"eval/pass@{k}"] = float(np.mean(known))
        k *= 2
    return metrics


def pass_at_k(rewards: Sequence[float | None], k: int) -> float | None:
    """Chance that k of these rollouts, drawn without return, hold a solved one; None with fewer
    than k usable.

    Source: Chen et al. 2021, arXiv:2107.03374: 1 - C(n - c, k) / C(n, k).
    """
    usable = [r for r in rewards if r is not None]
    if len(usable) < k:
        return None
    solved = sum(r >= SOLVED for r in usable)
    return 1.0 - math.comb(len(usable) - solved, k) / math.comb(len(usable), k)


def _row(sample: Sample) -> dict[str, Any]:
    return {
        "prompt_id": sample.prompt_id,
        "index_in_group": sample.index_in_group,
        "reward": sample.reward,
        "reward_cause": sample.reward_cause,
        "status": sample.status.value,
        "response_length": sample.response_length,
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "verdict": sample.metadata.get("verdict"),
    }


def _write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)

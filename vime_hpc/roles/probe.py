"""A fixed prompt's logprobs in every engine and in the trainer, compared when new weights have been published.

Digests prove what arrived, VerifiedTrainer compares on-policy samples. With weights that lag behind there are none, so the
leading rollout worker has each engine answer one fixed prompt as soon as it holds the version, and hands tokens and logprobs
over through the rendezvous, signed; the trainer computes the same logprobs from the weights it has just published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.config.tree import RunConfig
from vime_hpc.engine.client import EngineHTTPClient
from vime_hpc.errors import EngineError, WeightsMismatchError
from vime_hpc.protocols import Metrics
from vime_hpc.types import FloatArray, Sample, Status

log = logging.getLogger(__name__)
KEY = "probe/{epoch}/{version}"
"""Rendezvous key: the engines' answers, or None when one was lost and the version is to be published again."""
PROMPT = tuple((37 * i + 11) % 251 for i in range(24))
"""Token ids any vocabulary has."""
NUM_TOKENS = 16
SEED = 20_261_129
Logprobs = Callable[[Sequence[Sample]], list[FloatArray]]


def is_due(config: RunConfig, version: int, *, first: bool) -> bool:
    """After the first publish of an attempt and, where weights lag behind, every weights.verify_interval versions."""
    interval = config.weights.verify_interval
    if not interval:
        return False
    return first or (config.rollout.max_weight_lag > 0 and version % interval == 0)


async def ask_engines(
    urls: Sequence[str], token: str, *, temperature: float, max_model_len: int
) -> list[dict[str, Any]]:
    """{"prompt", "tokens", "logprobs"} of each engine's answer to the fixed prompt.

    Raises EngineError: an engine could not answer.
    """
    prompt = PROMPT[: max(1, max_model_len - NUM_TOKENS)]
    answers: list[dict[str, Any]] = []
    for index, url in enumerate(urls):
        async with EngineHTTPClient([url], token) as client:
            answer = await client.sample(
                prompt_tokens=prompt,
                seed=SEED,
                max_tokens=NUM_TOKENS,
                temperature=temperature,
                ignore_eos=True,
            )
        if answer.failed:
            raise EngineError(f"engine {index} could not answer the probe: {answer.cause}")
        answers.append(
            {"prompt": list(prompt), "tokens": answer.tokens, "logprobs": answer.logprobs}
        )
    return answers


class Publisher(Protocol):
    """protocols.WeightPublisher over bridges that are built again when an engine is lost."""

    epoch: int
    """Number of the bridge in use."""

    def publish(self, version: int) -> Metrics: ...

    def is_called(self) -> bool:
        """Whether the engines wait for the trainer in the next epoch."""
        ...


class ProbedPublisher:
    """protocols.WeightPublisher that stops the run when an engine computes with other weights than the trainer's.

    The first version of every epoch is probed, for an engine of it may have been started again.

    Args:
        publisher: the transport. logprobs: of samples under the trainer's present weights; collective over trainer ranks.
    """

    def __init__(
        self,
        publisher: Publisher,
        logprobs: Logprobs,
        config: RunConfig,
        rendezvous: Rendezvous,
    ) -> None:
        self._publisher, self._logprobs = publisher, logprobs
        self._config, self._rendezvous = config, rendezvous
        self._version = self._probed_epoch = -1

    def is_called(self) -> bool:
        """Whether engines that were started again wait for weights."""
        return self._publisher.is_called()

    def publish_again(self) -> None:
        """Publish once more what is published: for engines that were started again."""
        self.publish(self._version)

    def publish(self, version: int) -> Metrics:
        """As the transport's.

        Raises:
            WeightsMismatchError: names the engine and how far its logprobs are off.
        """
        self._version = version
        answers = None
        while answers is None:
            metrics = self._publisher.publish(version)
            epoch = self._publisher.epoch
            first, self._probed_epoch = epoch != self._probed_epoch, epoch
            if not is_due(self._config, version, first=first):
                return metrics
            answers = self._answers(epoch, version)
        expected = self._logprobs([_sample(answer) for answer in answers])
        worst = 0.0
        for index, (answer, values) in enumerate(zip(answers, expected, strict=True)):
            found = float(np.abs(np.asarray(answer["logprobs"]) - values).mean())
            self._refuse_unless_near(version, index, found)
            worst = max(worst, found)
        log.info(
            "version %d over bridge %d: logprobs of the fixed prompt differ by %.3g at most",
            version,
            epoch,
            worst,
        )
        return {**metrics, "weights/probe_logprob_abs_diff": worst}

    def _answers(self, epoch: int, version: int) -> list[dict[str, Any]] | None:
        answers: list[dict[str, Any]] | None = self._rendezvous.wait(
            KEY.format(epoch=epoch, version=version),
            timeout_s=self._config.run.wait_timeout_s,  # other requests may be before it
            who="rollout-0",
            phase=f"comparing logprobs of version {version} with the engines'",
        )
        return answers

    def _refuse_unless_near(self, version: int, engine: int, found: float) -> None:
        tolerance = self._config.weights.verify_tolerance
        if not found <= tolerance:
            raise WeightsMismatchError(
                f"version {version}: engine {engine}'s logprobs of a fixed prompt differ from the trainer's by {found:.3g} on "
                f"average, weights.verify_tolerance is {tolerance:g}. What arrived had the right digests, so either the "
                f"engine computes with something else, or the two sides' numerics differ by more than that: compare "
                f"model.dtype, [vllm] dtype and attention options, then set --weights.verify_tolerance"
            )


def _sample(answer: dict[str, Any]) -> Sample:
    length = len(answer["tokens"])
    return Sample(
        sample_id=0,
        group_id=0,
        rollout_id=0,
        prompt_id=0,
        index_in_group=0,
        tokens=np.array([*answer["prompt"], *answer["tokens"]], dtype=np.int32),
        response_length=length,
        loss_mask=np.ones(length, dtype=np.uint8),
        rollout_logprobs=np.array(answer["logprobs"], dtype=np.float32),
        status=Status.COMPLETED,
    )

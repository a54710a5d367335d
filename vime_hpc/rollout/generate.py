"""From a prompt to samples: the default single-turn rollout, and the parts custom ones are made of.

Token ids and logprobs of the engine are the truth; text is decoded from them for verifiers and
display only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vime_hpc.errors import DeadlineError, EngineError
from vime_hpc.protocols import EngineClient, RolloutClient, Turn
from vime_hpc.types import (
    ExpertArray,
    GroupRequest,
    Sample,
    Status,
    VersionSpan,
    rollout_id_of,
    sample_id_of,
)

STATUS_OF_FINISH = {
    "stop": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
}

AGAIN_LIMIT = 10
"""Times one request is handed out again because engines were lost."""
AskAgain = Callable[[EngineError], Awaitable[bool]]
"""Of a request that came to nothing: waits for an engine that is away; whether to ask again."""


async def single_turn(request: GroupRequest, index_in_group: int, client: RolloutClient,
                      table: Mapping[str, Any]) -> list[Sample]:  # fmt: skip
    """One prompt, one response, one sample."""
    builder = SampleBuilder(request, index_in_group)
    builder.add_turn(await client.sample(request.prompt.tokens.tolist()))
    return [builder.build(client)]


@dataclass
class SampleBuilder:
    """Collects the tokens of one sample; the only way to keep its columns the same length.

    `add_turn` appends what the model sampled (trained), `add_context` what the environment said
    (not trained). The next turn is sampled from `tokens`, so nothing is ever encoded twice.
    """

    request: GroupRequest
    index_in_group: int
    segment: int = 0
    _response: list[int] = field(default_factory=list)
    _mask: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _versions: list[VersionSpan] = field(default_factory=list)
    _experts: Any = None
    _finish_reason: str = ""
    _seed: int | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and everything after it so far."""
        return [*self.request.prompt.tokens.tolist(), *self._response]

    def add_turn(self, turn: Turn) -> None:
        """Append a model call's tokens, with their logprobs and weight versions."""
        offset = len(self._response)
        self._response += [int(t) for t in turn.tokens]
        self._logprobs += [float(p) for p in turn.logprobs]
        self._mask += [1] * len(turn.tokens)
        for span in turn.versions if len(turn.tokens) else ():
            if not self._versions or self._versions[-1].version != span.version:
                self._versions.append(VersionSpan(span.version, offset + span.start))
        self._experts = turn.routed_experts
        self._finish_reason = turn.finish_reason
        self._seed = turn.seed if self._seed is None else self._seed

    def add_context(self, tokens: Sequence[int]) -> None:
        """Append tokens the model did not sample: mask 0, logprob 0."""
        self._response += [int(t) for t in tokens]
        self._mask += [0] * len(tokens)
        self._logprobs += [0.0] * len(tokens)

    def build(self, client: RolloutClient, *, metadata: Mapping[str, Any] | None = None) -> Sample:
        """The sample; its status follows the last turn's finish reason."""
        tokens = np.asarray(self.tokens, dtype=np.int32)
        rollout_id = rollout_id_of(self.request.group_id, self.index_in_group)
        status = STATUS_OF_FINISH.get(self._finish_reason, Status.FAILED)
        cause = "" if status is not Status.FAILED else f"finish reason {self._finish_reason!r}"
        sample = Sample(
            sample_id=sample_id_of(rollout_id, self.segment),
            group_id=self.request.group_id,
            rollout_id=rollout_id,
            prompt_id=self.request.prompt.prompt_id,
            index_in_group=self.index_in_group,
            tokens=tokens,
            response_length=len(self._response),
            loss_mask=np.asarray(self._mask, dtype=np.uint8),
            rollout_logprobs=np.asarray(self._logprobs, dtype=np.float32),
            status=status,
            finish_reason=self._finish_reason,
            attempt=self.request.attempt,
            seed=self._seed or 0,
            reward_cause=cause,
            versions=tuple(self._versions),
            routed_experts=_flat_experts(self._experts, len(tokens)),
            prompt_text=self.request.prompt.text,
            response_text=client.decode(self._response),
            metadata=dict(metadata or {}),
        )
        return without_bad_logprobs(sample)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine samples."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    timeout_s: float = 600.0


@dataclass(slots=True)
class EngineTurn:
    """A checked EngineAnswer with its versions (a protocols.Turn)."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    routed_experts: Any
    versions: tuple[VersionSpan, ...]
    seed: int


@dataclass
class BoundClient:
    """A RolloutClient: the shared engine client with one rollout's seeds, under the worker's
    request limit.
    """

    client: EngineClient
    sampling: Sampling
    limit: asyncio.Semaphore
    seed_of_turn: Callable[[int], int]
    decode_tokens: Callable[[Sequence[int]], str]
    version_now: Callable[[], int]
    ask_again: AskAgain | None = None
    _turn: int = 0

    async def sample(self, prompt_tokens: Sequence[int], *, max_tokens: int | None = None) -> Turn:
        """One model call. Handed out again, with the same seed, when the engine that worked on it was lost.

        Raises:
            EngineError: the engine's answer cannot be right.
            DeadlineError: it took longer than rollout.request_timeout_s.
        """
        seed = self.seed_of_turn(self._turn)
        self._turn += 1
        for _ in range(AGAIN_LIMIT):
            try:
                return await self._one_try(prompt_tokens, max_tokens, seed)
            except EngineError as error:
                if self.ask_again is None or not await self.ask_again(error):
                    raise
        return await self._one_try(prompt_tokens, max_tokens, seed)

    async def _one_try(
        self, prompt_tokens: Sequence[int], max_tokens: int | None, seed: int
    ) -> Turn:
        options = self.sampling
        async with self.limit:
            started_with = self.version_now()
            try:
                async with asyncio.timeout(options.timeout_s):
                    answer = await self.client.sample(
                        prompt_tokens=prompt_tokens,
                        seed=seed,
                        max_tokens=max_tokens or options.max_tokens,
                        temperature=options.temperature,
                        top_p=options.top_p,
                        top_k=options.top_k,
                    )
            except TimeoutError as error:
                raise DeadlineError(
                    f"a request took longer than rollout.request_timeout_s = {options.timeout_s:g} s; "
                    f"the engine hangs or is overloaded"
                ) from error
        if answer.finish_reason == "failed":
            raise EngineError(
                getattr(answer, "cause", "") or "the engine could not answer this request"
            )
        if len(answer.tokens) != len(answer.logprobs):
            raise EngineError(
                f"the engine answered {len(answer.tokens)} tokens with {len(answer.logprobs)} logprobs"
            )
        # An engine that knows where weights changed says so; else all tokens count as made by the
        # oldest version.
        spans = getattr(answer, "versions", None) or (VersionSpan(started_with, 0),)
        return EngineTurn(
            list(answer.tokens),
            list(answer.logprobs),
            answer.finish_reason,
            answer.routed_experts,
            tuple(spans),
            seed,
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return self.decode_tokens(tokens)


def without_bad_logprobs(sample: Sample) -> Sample:
    """A sample with a NaN or infinite logprob becomes failed: kept for analysis, trained on
    nowhere.

    The places and values go to metadata["bad_logprobs"], the column gets 0 there and the mask 0
    everywhere, so that no reader can stumble over it.
    """
    bad = np.flatnonzero(~np.isfinite(sample.rollout_logprobs))
    if not len(bad):
        return sample
    values = {str(j): str(float(sample.rollout_logprobs[j])) for j in bad[:100]}
    return replace(
        sample,
        status=Status.FAILED,
        reward=None,
        reward_cause=f"{len(bad)} logprobs are not finite, the first at response token {bad[0]}",
        rollout_logprobs=np.where(np.isfinite(sample.rollout_logprobs), sample.rollout_logprobs, 0)
        .astype(np.float32),
        loss_mask=np.zeros_like(sample.loss_mask),
        metadata={**sample.metadata, "bad_logprobs": values},
    )  # fmt: skip


def failed_sample(request: GroupRequest, index_in_group: int, *, cause: str, version: int, seed: int = 0,
                  status: Status = Status.FAILED) -> Sample:  # fmt: skip
    """What stands in a group for a rollout that came to nothing: the prompt, no response, no
    reward.
    """
    rollout_id = rollout_id_of(request.group_id, index_in_group)
    return Sample(
        sample_id=sample_id_of(rollout_id),
        group_id=request.group_id,
        rollout_id=rollout_id,
        prompt_id=request.prompt.prompt_id,
        index_in_group=index_in_group,
        tokens=request.prompt.tokens,
        response_length=0,
        loss_mask=np.zeros(0, dtype=np.uint8),
        rollout_logprobs=np.zeros(0, dtype=np.float32),
        status=status,
        attempt=request.attempt,
        seed=seed,
        reward_cause=cause,
        versions=(VersionSpan(version, 0),),
        prompt_text=request.prompt.text,
    )


def check_samples(
    samples: Sequence[Sample], request: GroupRequest, index_in_group: int
) -> list[Sample]:
    """What a generate function returned, checked: identity, lengths, and logprobs that can be
    logprobs.

    Raises:
        EngineError: names the sample, the field and the two numbers that disagree.
    """
    if not isinstance(samples, (list, tuple)) or not samples:
        raise EngineError(
            f"the generate function returned {samples!r:.80}, expected a list of samples"
        )
    rollout_id = rollout_id_of(request.group_id, index_in_group)
    checked = []
    for number, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise EngineError(
                f"the generate function returned a {type(sample).__name__}, expected Sample"
            )
        expected = {
            "group_id": (sample.group_id, request.group_id),
            "rollout_id": (sample.rollout_id, rollout_id),
            "index_in_group": (sample.index_in_group, index_in_group),
            "sample_id": (sample.sample_id, sample_id_of(rollout_id, number)),
            "loss_mask": (len(sample.loss_mask), sample.response_length),
            "rollout_logprobs": (len(sample.rollout_logprobs), sample.response_length),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                kind = "length" if name in ("loss_mask", "rollout_logprobs") else "value"
                raise EngineError(
                    f"sample {number} of rollout {rollout_id}: {kind} of {name} is {found}, expected {wanted}"
                )
        if sample.prompt_length < 1:
            raise EngineError(
                f"sample {number} of rollout {rollout_id}: response_length {sample.response_length} "
                f"leaves no prompt in {len(sample.tokens)} tokens"
            )
        checked.append(without_bad_logprobs(sample))
    return checked


def _flat_experts(experts: Any, num_tokens: int) -> ExpertArray | None:
    """[rows, L, K] or [rows, L * K] to [T - 1, L * K]; None where the rows do not cover the
    sample.
    """
    if experts is None:
        return None
    array: ExpertArray = np.asarray(experts)
    if len(array) != num_tokens - 1:
        raise EngineError(
            f"routed_experts has {len(array)} rows for {num_tokens} tokens, expected {num_tokens - 1}"
        )
    return array.reshape(len(array), math.prod(array.shape[1:]))

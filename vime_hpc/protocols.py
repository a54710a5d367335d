"""Every seam of the system as a Protocol: what the loops call, and what a user may replace by a dotted path.

A user's function receives the typed sample and its own configuration table, never the run configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vime_hpc.types import GroupRequest, Prompt, PromptGroup, Sample, SampleTable, VersionSpan

Metrics = dict[str, float]


# --- what trainer_loop calls -------------------------------------------------------------------------------------


class StepBatch(Protocol):
    """One committed step of the buffer. `table` is small and whole; `read` fetches the tokens of some samples."""

    step: int
    table: SampleTable
    stats: Mapping[str, float]
    """Rollout-side metrics stored in the step's commit."""

    def read(self, indices: Sequence[int], *, layers: slice | None = None) -> list[Sample]:
        """The samples at these rows of `table`, digests checked; of per-layer columns only `layers`."""
        ...


class BatchSource(Protocol):
    def wait_for(self, step: int) -> StepBatch | None:
        """Block until step is committed; None, on every rank, when a stop was asked for meanwhile.

        Raises DeadlineError naming who has not sealed.
        """
        ...


class Trainer(Protocol):
    def step(self, batch: StepBatch) -> Metrics:
        """One optimizer step (or several, by configuration) on the batch; collective over trainer ranks."""
        ...


class WeightPublisher(Protocol):
    def publish(self, version: int) -> Metrics:
        """Send the trainer's present weights as `version`; returns once every receiver confirmed its digest."""
        ...


class CheckpointKeeper(Protocol):
    def restore(self) -> int:
        """Load the newest complete checkpoint, if any; returns the next step to train (0 when fresh)."""
        ...

    def save_if_due(self, next_step: int, *, force: bool = False) -> Metrics:
        """Save model, optimizer and the frontier `next_step` as one transaction when the interval says so."""
        ...


class StopFlag(Protocol):
    def agreed(self) -> bool:
        """True on every rank once any rank was told to stop (signal, time limit); collective where needed."""
        ...


class TrainerLog(Protocol):
    def log(self, step: int, metrics: Mapping[str, float], batch: StepBatch) -> None: ...


# --- what rollout_loop calls -------------------------------------------------------------------------------------


class WeightReceiver(Protocol):
    def receive(self, at_least: int) -> int:
        """Bring every engine, version by version, to at least this one; returns the version held.

        Raises RequeueRequested when the job stops meanwhile.
        """
        ...

    def leave(self) -> None:
        """The job stops: join what the trainer still publishes, until it says that it stopped."""
        ...


class BatchSink(Protocol):
    @property
    def next_step(self) -> int:
        """First step that is not committed yet."""
        ...

    def append(
        self,
        step: int,
        groups: Sequence[PromptGroup],
        *,
        resume_state: Mapping[str, Any],
        stats: Mapping[str, float],
    ) -> None:
        """Seal and commit the step: after this returns it survives SIGKILL of everything."""
        ...


class Generator(Protocol):
    def generate(self, step: int, version: int) -> tuple[list[PromptGroup], Metrics]:
        """A whole step's prompt groups, graded, in group_id order. Raises RequeueRequested when the job stops."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Resume state of the prompt source once the step just generated is committed."""
        ...


class Evaluator(Protocol):
    def evaluate_if_due(self, version: int, *, last: bool = False) -> None: ...


# --- extension points chosen by a dotted path --------------------------------------------------------------------


class Reward(Protocol):
    """`async def reward(sample, prompt, table) -> float | dict`; an exception makes the reward unusable, never 0."""

    async def __call__(
        self, sample: Sample, prompt: Prompt, table: Mapping[str, Any]
    ) -> float | Mapping[str, Any]: ...


class GroupFilter(Protocol):
    """Keep the group (None) or drop it, with the reason that is counted in the metrics."""

    def __call__(self, group: PromptGroup, table: Mapping[str, Any]) -> str | None: ...


class EngineClient(Protocol):
    """Token ids in, token ids and logprobs out."""

    async def sample(
        self,
        *,
        prompt_tokens: Sequence[int],
        seed: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
    ) -> EngineAnswer: ...


class EngineAnswer(Protocol):
    @property
    def tokens(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def routed_experts(self) -> Any: ...


class Turn(EngineAnswer, Protocol):
    """One model call of a rollout."""

    versions: tuple[VersionSpan, ...]
    """Weights that made `tokens`; starts count from the turn's first token."""
    seed: int


class RolloutClient(Protocol):
    """An engine client bound to one rollout: sampling options, the seed of each turn and the versions are filled in."""

    async def sample(
        self, prompt_tokens: Sequence[int], *, max_tokens: int | None = None
    ) -> Turn: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text for display and verifiers; never to be encoded again."""
        ...


class GenerateFunction(Protocol):
    """A rollout: one request in, one or more samples (sharing its rollout_id) out. Default: a single turn."""

    async def __call__(
        self,
        request: GroupRequest,
        index_in_group: int,
        client: RolloutClient,
        table: Mapping[str, Any],
    ) -> list[Sample]: ...

"""The rollout worker's side of the buffer: acknowledge groups, seal a step, commit it.

Order of a step, every arrow a point at which the process may be killed (tests kill at each):
groups into the journal (fdatasync) -> segment written aside -> fsync -> rename -> fsync of the directory -> seal written
aside -> rename -> fsync -> once every worker has sealed: commit written aside -> rename -> fsync -> journals removed.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from vime_hpc.buffer.attempts import (
    check_not_fenced,
    commit_if_sealed,
    enter_attempt,
    list_attempts,
    recover_groups,
    sweep,
)
from vime_hpc.buffer.codec import pack_sample
from vime_hpc.buffer.files import BackgroundSync, Disk, file_digest
from vime_hpc.buffer.index import (
    Record,
    describe_segment,
    make_seal,
    next_uncommitted,
    read_commit,
    read_identity,
    read_record,
    write_record,
)
from vime_hpc.buffer.journal import Journal
from vime_hpc.buffer.layout import ASIDE, WORKER_PATTERN, find_buffer, journal_name, seal_name
from vime_hpc.buffer.segment_writer import write_segment
from vime_hpc.errors import ConfigError, DamagedDataError
from vime_hpc.types import PromptGroup, Sample

log = logging.getLogger(__name__)
WORKER_FORMAT = "vime-hpc buffer worker"


class BufferWriter:
    """One rollout worker's writer (a `BatchSink`). Each worker writes its own files; nothing is shared or locked."""

    def __init__(
        self,
        root: Path,
        *,
        worker: int = 0,
        num_workers: int = 1,
        attempt: int = 0,
        durable: bool = True,
        store_text: bool = True,
        owns: Callable[[int], bool] | None = None,
        producer: str = "vime_hpc",
        disk: Disk | None = None,
    ) -> None:
        """Fence off earlier attempts, complete a commit they left one rename short, and replay their journals.

        Args:
            root: the buffer or run directory, made by `RolloutBuffer.create`.
            worker, num_workers: which of how many rollout workers of this attempt writes here.
            attempt: how often the run was started before; must rise with every start (`RolloutBuffer.next_attempt`).
            durable: False skips every fsync: tests and throw-away runs only.
            store_text: False leaves prompt and response text empty; tokens are the truth anyway.
            owns: which acknowledged groups of a dead attempt this worker takes over; by default those with
                group_id % num_workers == worker.
        Raises:
            RunLockedError: a later attempt has taken over.
        """
        if not 0 <= worker < num_workers:
            raise ConfigError(f"worker {worker} of {num_workers}: expected 0..{num_workers - 1}")
        self.layout, self.worker, self.num_workers, self.attempt = (
            find_buffer(Path(root)),
            worker,
            num_workers,
            attempt,
        )
        self.run_id, self.schema = read_identity(self.layout)
        self._producer, self._store_text = producer, store_text
        self._disk = disk or Disk(durable=durable)
        self._directory = self.layout.attempt(attempt)
        enter_attempt(self.layout, attempt, self._disk)
        self._announce()
        self._complete_commits()
        self._committed_before = next_uncommitted(self.layout)
        self._recovered = recover_groups(
            self.layout,
            self.schema,
            self._committed_before,
            attempt,
            worker,
            owns or (lambda group_id: group_id % num_workers == worker),
        )
        self._next = self._first_unsealed()
        self._live: dict[int, dict[int, PromptGroup]] = {}
        self._journals: dict[int, Journal] = {}
        self._journals_lock = threading.Lock()
        if worker == 0:
            self._sweep(self._committed_before)

    @property
    def next_step(self) -> int:
        """First step this worker has not sealed; after a start, the first step that is not committed."""
        return self._next

    def recovered_groups(self, step: int) -> list[PromptGroup]:
        """Groups of `step` that need no generating, in group_id order.

        Acknowledged by an earlier attempt, or left over from the step before (journaled, but not in its append).
        """
        return [group for _, group in sorted(self._recovered.get(step, {}).items())]

    def last_resume_state(self) -> Mapping[str, Any] | None:
        """This worker's resume state in the newest commit, None before the first.

        With another number of workers than then, that of worker 0.
        """
        last = next_uncommitted(self.layout) - 1
        if not self.layout.commit(last).exists():
            return None
        workers = read_commit(self.layout, last)["workers"]
        state: Mapping[str, Any] = workers[self.worker if len(workers) == self.num_workers else 0][
            "resume_state"
        ]
        return state

    def journal_group(self, step: int, group: PromptGroup) -> None:
        """Acknowledge one finished group of an open step: it survives SIGKILL and power loss from here on.

        Thread-safe; concurrent callers share one fdatasync.
        """
        group = self._admitted(group)
        self._check_open(step)
        self._journal(step).write_group(group, self._next)
        self._live.setdefault(step, {})[group.group_id] = group
        # Acknowledge only what a later attempt is sure to have read: it fences first and reads then.
        check_not_fenced(self.layout, self.attempt)

    def discard_group(self, step: int, group_id: int) -> None:
        """Forget an acknowledged group of an open step (a filter dropped it): it will not be carried over or recovered."""
        self._check_open(step)
        self._journal(step).write_discard(group_id, self._next)
        for known in (self._live, self._recovered):
            known.get(step, {}).pop(group_id, None)

    def append(
        self,
        step: int,
        groups: Sequence[PromptGroup],
        *,
        resume_state: Mapping[str, Any],
        stats: Mapping[str, float],
    ) -> None:
        """Seal this worker's part of the step, and commit the step once every worker has sealed.

        After it returns the groups survive SIGKILL of everything. Acknowledged groups of this step that are not in
        `groups` are carried over to the next one.

        Raises:
            DamagedDataError: a sample's columns disagree, or an id appears twice; nothing was written.
            RunLockedError: a later attempt has taken over.
        """
        self._check_open(step)
        if step != self._next:
            raise ConfigError(
                f"{self.layout.root}: append of step {step}, expected step {self._next}: steps are sealed in order"
            )
        admitted = [self._admitted(group) for group in groups]
        samples = sorted(
            (sample for group in admitted for sample in group.samples),
            key=lambda sample: sample.sample_id,
        )
        _check_unique(step, samples)
        self._carry_over(step, {group.group_id for group in admitted})
        try:
            segment = self._write_segment(step, samples)
            seal = make_seal(
                run_id=self.run_id,
                step=step,
                worker=self.worker,
                num_workers=self.num_workers,
                attempt=self.attempt,
                segment=segment,
                resume_state=resume_state,
                stats=stats,
            )
            write_record(
                self._disk, self._directory / seal_name(step, self.worker), seal, point="seal"
            )
        except FileNotFoundError:
            check_not_fenced(self.layout, self.attempt)
            raise
        self._next = step + 1
        self._live.pop(step, None)
        self._recovered.pop(step, None)
        if commit_if_sealed(
            self.layout, step, self._directory, self._directory, self.worker, self._disk
        ):
            self._disk.at("commit.seen")
            self._sweep(step + 1)
        else:
            check_not_fenced(self.layout, self.attempt)
        self._close_journals(step + 1)

    def close(self) -> None:
        """Close the journals; what they hold stays for the next start."""
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- start ----------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        for path in self._directory.iterdir():
            if WORKER_PATTERN.fullmatch(path.name):
                other = read_record(path, WORKER_FORMAT)
                if other["num_workers"] != self.num_workers:
                    raise ConfigError(
                        f"{path}: worker {other['worker']} of this attempt counts {other['num_workers']} workers, "
                        f"worker {self.worker} counts {self.num_workers}; all must be started with the same number"
                    )
        record = {
            "format": WORKER_FORMAT,
            "format_version": 1,
            "worker": self.worker,
            "num_workers": self.num_workers,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        write_record(
            self._disk, self._directory / f"worker-{self.worker:04d}.json", record, point="worker"
        )

    def _complete_commits(self) -> None:
        """A step all workers of one attempt sealed is as good as committed: every start draws the same conclusion."""
        for directory in list_attempts(self.layout):
            if directory.fenced or directory.attempt == self.attempt:
                step = next_uncommitted(self.layout)
                while commit_if_sealed(
                    self.layout, step, directory.path, self._directory, self.worker, self._disk
                ):
                    log.info(
                        "buffer: step %d was sealed by every worker of %s; committed",
                        step,
                        directory.path.name,
                    )
                    step += 1

    def _first_unsealed(self) -> int:
        step = self._committed_before
        while (self._directory / seal_name(step, self.worker)).exists():
            self._recovered.pop(step, None)
            step += 1
        return step

    # --- a step ---------------------------------------------------------------------------------------------------

    def _check_open(self, step: int) -> None:
        if step < self._next:
            raise ConfigError(
                f"{self.layout.root}: step {step} is sealed; worker {self.worker} goes on with step {self._next}"
            )

    def _admitted(self, group: PromptGroup) -> PromptGroup:
        """The group with samples nothing can learn from marked unusable, with the cause, never left to the loss."""
        if not group.samples:
            raise DamagedDataError(
                f"prompt group {group.group_id} has no samples; a failed rollout is a sample of status failed"
            )
        for sample in group.samples:
            if sample.group_id != group.group_id:
                raise DamagedDataError(
                    f"sample {sample.sample_id} says group {sample.group_id}, but lies in group {group.group_id}"
                )
        if not self._store_text:
            textless = tuple(
                replace(sample, prompt_text="", response_text="") for sample in group.samples
            )
            group = replace(group, samples=textless)
        causes = [_unusable_cause(sample) for sample in group.samples]
        if not any(causes):
            return group
        log.warning(
            "buffer: group %d: %d of %d samples unusable: %s",
            group.group_id,
            sum(map(bool, causes)),
            len(causes),
            "; ".join(cause for cause in causes if cause),
        )
        samples = tuple(
            sample.with_reward(None, cause) if cause else sample
            for sample, cause in zip(group.samples, causes, strict=True)
        )
        return replace(group, samples=samples)

    def _journal(self, step: int) -> Journal:
        # Two threads that open the same file one after the other would cut off what the first has just written.
        with self._journals_lock:
            if step not in self._journals:
                self._journals[step] = self._open_journal(step)
            return self._journals[step]

    def _open_journal(self, step: int) -> Journal:
        header = {
            "run_id": self.run_id,
            "step": step,
            "worker": self.worker,
            "attempt": self.attempt,
        }
        path = self._directory / journal_name(step, self.worker)
        try:
            return Journal(path, self.schema, header, self._disk)
        except FileNotFoundError:
            check_not_fenced(self.layout, self.attempt)
            raise

    def _carry_over(self, step: int, sealed: set[int]) -> None:
        """Acknowledged groups the step does not use go to the next one, before the step can be committed without them."""
        surplus = {**self._recovered.get(step, {}), **self._live.get(step, {})}
        following = self._recovered.setdefault(step + 1, {})
        for group_id, group in surplus.items():
            if group_id not in sealed and group_id not in self._live.get(step + 1, {}):
                self._journal(step + 1).write_group(group, step)
                following[group_id] = group
        for later in (self._recovered, self._live):
            for known in (groups for number, groups in later.items() if number > step):
                for group_id in sealed & set(known):
                    del known[group_id]

    def _write_segment(self, step: int, samples: Sequence[Sample]) -> Record:
        path = self.layout.segment(step, self.worker, self.attempt)
        aside = path.with_name(path.name + ASIDE)
        self._disk.make_directory(path.parent)
        packed = [pack_sample(self.schema, sample, check_experts=False) for sample in samples]
        header = {
            "run_id": self.run_id,
            "step": step,
            "worker": self.worker,
            "num_workers": self.num_workers,
            "attempt": self.attempt,
            "producer": self._producer,
        }
        with BackgroundSync(self._disk, aside) as sync:
            try:
                header_digest = write_segment(aside, self.schema, packed, header, sync.start)
            except DamagedDataError:
                aside.unlink()
                raise
            self._disk.at("segment.written")
            sync.start()
            size, digest = file_digest(aside)  # meanwhile, from memory
            sync.finish()
        self._disk.at("segment.synced")
        self._disk.publish(aside, path)
        self._disk.at("segment.durable")
        return describe_segment(
            samples,
            self.layout.relative(path),
            size,
            digest,
            header_digest,
            self._recovered.get(step, {}),
        )

    # --- leftovers ------------------------------------------------------------------------------------------------

    def _sweep(self, before_step: int) -> None:
        names = sweep(self.layout, before_step, self.attempt)
        stale = [name for name in names if f"/e{self.attempt:04d}/" not in f"/{name}"]
        if stale:
            log.info(
                "buffer: removed %d leftovers of earlier attempts: %s",
                len(stale),
                ", ".join(stale[:20]),
            )
        self._disk.at("swept")

    def _close_journals(self, before_step: int) -> None:
        for step in [step for step in self._journals if step < before_step]:
            self._journals.pop(step).close()


def _unusable_cause(sample: Sample) -> str:
    """Why a sample that claims a reward cannot be trained on; empty when it can (or claims none)."""
    if sample.reward is None:
        return "" if sample.reward_cause else "no reward"
    if not math.isfinite(sample.reward):
        return f"reward is {sample.reward}"
    trained = np.asarray(sample.loss_mask) != 0
    logprobs = np.asarray(sample.rollout_logprobs)
    broken = (
        np.flatnonzero(trained & ~np.isfinite(logprobs))
        if trained.shape == logprobs.shape
        else np.empty(0)
    )
    if broken.size:
        return f"rollout_logprobs not finite at response tokens {broken[:8].tolist()}"
    return ""


def _check_unique(step: int, samples: Sequence[Sample]) -> None:
    for left, right in itertools.pairwise(samples):
        if left.sample_id == right.sample_id:
            raise DamagedDataError(
                f"step {step}: sample {left.sample_id} appears twice; ids are made by "
                "vime_hpc.types.sample_id_of and rollout_id_of"
            )

"""Prompts in order: which prompt belongs to which group id, for ever and on every machine.

The source is a function from group id to prompt: group g of epoch e = g // len is place g % len of
that epoch's permutation, which comes from (seed, e) alone. So its whole state is the next group id,
a group handed out twice (after a crash, or because it was aborted) is the same prompt, and nothing
depends on timing.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from vime_hpc.config.data import DataConfig
from vime_hpc.errors import ConfigError, PromptDataError
from vime_hpc.rollout.prompt_file import Record, read_prompt_file
from vime_hpc.rollout.tokenizer import Messages, PromptTokenizer
from vime_hpc.types import GroupRequest, IntArray, Prompt

log = logging.getLogger(__name__)

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The usable prompts of one file, in its order."""

    prompts: tuple[Prompt, ...]
    num_records: int
    num_too_long: int
    num_skipped_lines: int
    digest: str
    """XXH3-64 over the token ids, labels and metadata of all prompts in order."""

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(path: str, data: DataConfig, tokenizer: PromptTokenizer) -> PromptSet:
    """Read, render, tokenize and check a prompt file; prompts over data.max_prompt_tokens are left
    out and counted.

    Raises:
        ConfigError: no such file.
        PromptDataError: a line that cannot be used (file and physical line), or no prompt left.
    """
    file = read_prompt_file(path, skip_bad_lines=data.skip_bad_lines)
    prompts: list[Prompt] = []
    hasher = xxhash.xxh3_64()
    too_long = 0
    skipped = len(file.skipped)
    for prompt_id, (line, record) in enumerate(file.records):
        try:
            prompt = _prompt(record, prompt_id, data, tokenizer)
        except PromptDataError as error:
            if not data.skip_bad_lines:
                raise PromptDataError(f"{path}, line {line}: {error}") from error
            skipped += 1
            continue
        if len(prompt.tokens) > data.max_prompt_tokens:
            too_long += 1
            continue
        hasher.update(prompt.tokens.astype("<i4").tobytes())
        extras = json.dumps([prompt.label, prompt.metadata], sort_keys=True, default=str)
        hasher.update(extras.encode())
        prompts.append(prompt)
    if skipped:
        log.warning("%s: %d line%s skipped", path, skipped, "" if skipped == 1 else "s")
    if too_long:
        log.warning(
            "%s: %d prompts are longer than data.max_prompt_tokens = %d and left out",
            path, too_long, data.max_prompt_tokens,
        )  # fmt: skip
    if not prompts:
        raise PromptDataError(
            f"{path}: no usable prompt: {len(file.records)} records, {too_long} longer than "
            f"data.max_prompt_tokens = {data.max_prompt_tokens}, {skipped} skipped"
        )
    return PromptSet(tuple(prompts), len(file.records), too_long, skipped, hasher.hexdigest())


class PromptSource:
    """Hands out prompt groups with running ids; endless, a new permutation every epoch.

    With several rollout workers, worker w of W hands out the ids w, w + W, w + 2 W, ... of the one
    common order.
    """

    def __init__(self, prompts: PromptSet, *, seed: int, group_size: int, shuffle: bool = True,
                 worker: int = 0, num_workers: int = 1) -> None:  # fmt: skip
        if not 0 <= worker < num_workers:
            raise ValueError(f"worker {worker} is not in 0..{num_workers - 1}")
        self.prompts = prompts
        self._seed, self._shuffle, self._group_size = seed, shuffle, group_size
        self._worker, self._num_workers = worker, num_workers
        self._next = worker
        self._used: frozenset[int] = frozenset()
        self._order: tuple[int, IntArray] | None = None

    @property
    def next_group_id(self) -> int:
        """The id `next_request` will hand out."""
        return self._next

    def next_request(self) -> GroupRequest:
        """The next group of this worker."""
        request = self.request(self._next)
        self.rewind(self._next + 1)
        return request

    def request(self, group_id: int) -> GroupRequest:
        """The group of this id, whenever it is asked for."""
        epoch, place = divmod(group_id, len(self.prompts))
        prompt = self.prompts.prompts[int(self._permutation(epoch)[place])]
        return GroupRequest(group_id, prompt, self._group_size)

    def ids(self) -> Iterator[int]:
        """This worker's group ids from next_group_id on, endless."""
        return (i for i in itertools.count(self._next, self._num_workers) if i not in self._used)

    def rewind(self, group_id: int) -> None:
        """Hand out this worker's ids from group_id on (the frontier) again."""
        self._next = group_id + (self._worker - group_id) % self._num_workers
        while self._next in self._used:
            self._next += self._num_workers
        self._used = frozenset(i for i in self._used if i > self._next)

    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._next / len(self.prompts)

    def state(self) -> dict[str, Any]:
        """JSON-serialisable; describes the frontier: this worker's ids below next_group_id are used up,
        and so are those in used_above (after a change of rollout.num_workers)."""
        return {
            "state_version": STATE_VERSION,
            "next_group_id": self._next,
            "used_above": sorted(self._used),
            "worker": self._worker,
            "num_workers": self._num_workers,
            "num_prompts": len(self.prompts),
            "prompts_digest": self.prompts.digest,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def restore(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue exactly where `state` was taken.

        Args:
            state: this worker's own, or those of all workers of the same step. All are needed when the
                number of workers has changed: the ids they used are shared out anew, none is lost.
        Raises:
            ConfigError: the state is of other prompts, another seed or shuffling, with which group ids
                would mean other prompts; or of another number of workers, and not all are given.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            self._refuse_other(one)
        same = [
            s
            for s in states
            if s["num_workers"] == self._num_workers and s["worker"] == self._worker
        ]
        if same:
            self._used = frozenset(same[0]["used_above"])
            self.rewind(int(same[0]["next_group_id"]))
            return
        if len({s["worker"] for s in states}) != states[0]["num_workers"]:
            raise ConfigError(
                f"rollout.num_workers was {states[0]['num_workers']} and is now {self._num_workers}; the "
                f"states of all {states[0]['num_workers']} workers are needed to go on, {len(states)} are "
                f"there. Set rollout.num_workers = {states[0]['num_workers']}"
            )
        lowest = min(int(s["next_group_id"]) for s in states)
        highest = max(max([int(s["next_group_id"]), *s["used_above"]]) for s in states)
        self._used = frozenset(
            i for i in range(lowest, highest + 1) if any(_is_used(i, s) for s in states)
        )
        self._used = frozenset(i for i in self._used if i % self._num_workers == self._worker)
        self.rewind(lowest)

    def _refuse_other(self, state: Mapping[str, Any]) -> None:
        mine = self.state()
        names = {
            "state_version": "the version of this state",
            "num_prompts": "the number of usable prompts (data.train, data.max_prompt_tokens)",
            "prompts_digest": "the prompts themselves (data.train, chat template, tokenizer)",
            "seed": "run.seed",
            "shuffle": "data.shuffle",
        }
        for key, meaning in names.items():
            if state.get(key) != mine[key]:
                raise ConfigError(
                    f"the prompt source cannot continue: {meaning} was {state.get(key)} and is now "
                    f"{mine[key]}, so group ids would mean other prompts. Restore it, or start a new run.dir"
                )

    def _permutation(self, epoch: int) -> IntArray:
        if self._order is None or self._order[0] != epoch:
            count = len(self.prompts)
            order = np.arange(count, dtype=np.int64)
            if self._shuffle:
                order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(order)
            self._order = (epoch, order)
        return self._order[1]


def _is_used(group_id: int, state: Mapping[str, Any]) -> bool:
    """Whether the worker of this state has used the id up."""
    if group_id % int(state["num_workers"]) != int(state["worker"]):
        return False
    return group_id < int(state["next_group_id"]) or group_id in state["used_above"]


def _prompt(record: Record, prompt_id: int, data: DataConfig, tokenizer: PromptTokenizer) -> Prompt:
    check_record(record, data)
    value, metadata = record[data.prompt_key], record.get("metadata", {})
    if data.apply_chat_template:
        text = tokenizer.render(as_messages(value), **_template_options(record))
        tokens = tokenizer.encode_rendered(text)
    else:
        text = value
        tokens = tokenizer.encode_plain(text)
    if len(tokens) == 0:
        raise PromptDataError(f"{data.prompt_key!r} is empty")
    return Prompt(prompt_id, tokens, text, record.get(data.label_key), metadata)


def check_record(record: Record, data: DataConfig) -> None:
    """What can be said of a record without a tokenizer.

    Raises:
        PromptDataError: no prompt, one of a wrong type, or metadata that is no object.
    """
    if data.prompt_key not in record:
        raise PromptDataError(
            f"the record has no key {data.prompt_key!r} (data.prompt_key); its keys are "
            f"{', '.join(sorted(map(repr, record)))}"
        )
    value, metadata = record[data.prompt_key], record.get("metadata", {})
    if not isinstance(metadata, dict):
        raise PromptDataError(f"metadata is a {type(metadata).__name__}, not an object")
    if data.apply_chat_template:
        as_messages(value)
    elif not isinstance(value, str):
        raise PromptDataError(
            f"{data.prompt_key!r} is a {type(value).__name__}; with data.apply_chat_template = false "
            f"it must be a string"
        )


def as_messages(value: Any) -> Messages:
    """A string becomes one user message; a list is checked to be of {role, content}.

    Raises:
        PromptDataError: anything else.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise PromptDataError(
            f"the prompt is {value!r:.80}, expected a string or a list of {{role, content}}"
        )
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise PromptDataError(
                f"message {number} of the prompt is {message!r:.80}, expected {{role, content}}"
            )
    return value


def _template_options(record: Record) -> dict[str, Any]:
    tools = record.get("tools")
    return {"tools": tools} if tools else {}

"""Makers of buffer samples, and disks that stop, fail or refuse on purpose: for tests of the buffer and of its users."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vime_hpc.buffer.export import sample_row
from vime_hpc.buffer.files import Disk
from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.values import encode_json, image_digest, nucleus_columns
from vime_hpc.types import PromptGroup, Sample, Status, VersionSpan, rollout_id_of, sample_id_of

AnyArray = npt.NDArray[Any]
TEXTS = ("", "plain", "a\0b", "tail\0\0", "\ud800x", "ünï 漢字 🙂", "line\nline\x1b[31m")
"""Texts that broke other rollout files: NUL, lone surrogates, control characters."""


def make_sample(
    schema: BufferSchema,
    group_id: int,
    index: int,
    *,
    prompt: int = 5,
    response: int = 4,
    salt: int = 0,
) -> Sample:
    """A sample whose every column is a pure function of the arguments, so that a test can tell what it must read back."""
    rng = np.random.default_rng([salt, group_id, index, prompt, response])
    rollout_id, total = rollout_id_of(group_id, index), prompt + response
    routed = None
    if schema.routing is not None:
        shape = schema.routing
        scores = rng.random(((total - 1) * shape.num_layers, shape.num_experts))
        chosen = np.argsort(scores, axis=1)[:, : shape.top_k]
        routed = chosen.reshape(total - 1, shape.num_layers * shape.top_k).astype(shape.dtype)
    columns = {
        column.name: rng.random(response).astype(column.dtype)
        for column in schema.optional_columns
        if column.axis == "response_token"
    }
    tokens = rng.integers(0, 150_000, total).astype(np.int32)
    columns |= _free_columns(schema, tokens[prompt:], salt + group_id + index)
    return Sample(
        sample_id=sample_id_of(rollout_id),
        group_id=group_id,
        rollout_id=rollout_id,
        prompt_id=group_id % 97,
        index_in_group=index,
        tokens=tokens,
        response_length=response,
        loss_mask=rng.integers(0, 2, response).astype(np.uint8),
        rollout_logprobs=-rng.random(response).astype(np.float32),
        status=list(Status)[index % 2],
        finish_reason="stop",
        attempt=index % 3,
        seed=int(rng.integers(0, 2**62)),
        reward=float(rng.normal()),
        versions=(VersionSpan(group_id // 4, 0), VersionSpan(group_id // 4 + 1, response // 2))
        if response > 1
        else (),
        routed_experts=routed,
        prompt_text=TEXTS[group_id % len(TEXTS)],
        response_text=TEXTS[(group_id + index) % len(TEXTS)],
        metadata={"salt": salt, "nested": {"list": [1, None, "x"]}},
        columns=columns,
    )


def _free_columns(schema: BufferSchema, response: AnyArray, seed: int) -> dict[str, AnyArray]:
    """Declared columns whose length the sample does not fix. Every third response token comes from no engine."""
    declared: dict[str, AnyArray] = {}
    if "top_p_token_ids" in schema.optional:
        declared |= nucleus_columns(
            [
                [] if place % 3 == 2 else [int(token), *range(place + seed % 4)]
                for place, token in enumerate(response)
            ]
        )
    if "image_digests" in schema.optional:
        images = [f"image {seed} {number}".encode() for number in range(seed % 3)]
        declared["image_digests"] = encode_json([image_digest(image) for image in images])
    if "image_xxh3_64" in schema.optional:
        declared["image_xxh3_64"] = np.asarray(seed + 2**63, dtype=np.uint64)
    if "trace" in schema.optional:
        declared["trace"] = encode_json({"spans": [{"name": "ünï", "start_s": seed / 8}]})
    return declared


def make_group(
    schema: BufferSchema, group_id: int, *, size: int = 2, salt: int = 0, **lengths: int
) -> PromptGroup:
    """A prompt group of `size` samples, a pure function of the arguments."""
    samples = tuple(
        make_sample(schema, group_id, index, salt=salt, **lengths) for index in range(size)
    )
    return PromptGroup(group_id, group_id % 97, samples)


def same_sample(left: Sample, right: Sample) -> bool:
    """Bit-equal in every column."""
    first, second = sample_row(0, left), sample_row(0, right)
    return first.keys() == second.keys() and all(_same(first[name], second[name]) for name in first)


def same_groups(left: Sequence[PromptGroup], right: Sequence[PromptGroup]) -> bool:
    """The same groups in the same order, bit for bit."""
    return [group.group_id for group in left] == [group.group_id for group in right] and all(
        len(one.samples) == len(two.samples) and all(map(same_sample, one.samples, two.samples))
        for one, two in zip(left, right, strict=True)
    )


class RecordingDisk(Disk):
    """Notes the name of every point of the write protocol it passes."""

    def __init__(self, *, durable: bool = False) -> None:
        super().__init__(durable=durable)
        self.points: list[str] = []

    def at(self, point: str) -> None:
        self.points.append(point)


class KillingDisk(Disk):
    """SIGKILLs its own process at the n-th point of the write protocol."""

    def __init__(self, at_point: int) -> None:
        super().__init__(durable=False)
        self._left = at_point

    def at(self, point: str) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


class FailingDisk(Disk):
    """Its n-th operation raises an OSError of the given errno, as a dying or full device does."""

    def __init__(self, error: int, at_call: int) -> None:
        super().__init__(durable=True)
        self._error, self._left = error, at_call
        self.has_failed = False

    def _call(self) -> None:
        if self._left == 0:
            self._left -= 1
            self.has_failed = True
            raise OSError(self._error, os.strerror(self._error))
        self._left -= 1

    def sync_file(self, path: Path) -> None:
        self._call()

    def sync_descriptor(self, descriptor: int) -> None:
        self._call()

    def sync_directory(self, path: Path) -> None:
        self._call()

    def write_aside(self, path: Path, data: bytes) -> None:
        self._call()
        super().write_aside(path, data)

    def publish(self, aside: Path, path: Path) -> None:
        self._call()
        super().publish(aside, path)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    return bool(left == right)

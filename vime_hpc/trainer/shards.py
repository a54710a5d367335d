"""A checkpoint's tensors on disk: each rank one safetensors file of boxes, and an index that finds
them again.

A tensor of the model or optimizer is stored as the boxes that the ranks held. Loading asks for
boxes too, of any other
layout, and copies what overlaps: exact, and independent of how either side was cut. What is a box
    of what comes from
megatron-core's own sharded_state_dict, so new optimizers and layers need nothing here. Megatron's
own writer is not
used: it stores pickles, and its first save in a process spawns a manager that imports torch again
    (6-14 s).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from safetensors import safe_open
from torch import Tensor

from vime_hpc.errors import CheckpointCorruptError

Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(file, offset in the whole tensor, shape)."""


def boxes_to_save(section: str, state: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """What this rank has to write of a sharded state dict.

    Args:
        section: put before every name, so that several models fit in one checkpoint.
        state: from sharded_state_dict(); consumed.
    Returns:
        {name@offset: tensor with the rank of the whole tensor} of those this rank is the first
        holder of, and the plain Python part (the same on every rank).
    """
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    boxes: dict[str, Tensor] = {}
    for item in nested_values(sharded):
        if isinstance(item, ShardedObject):
            assert item.data is None or not getattr(item.data, "nbytes", 1), (
                f"{item.key}: objects are not stored"
            )
            continue
        assert item.flattened_range is None, f"{item.key}: flattened shards are not stored"
        if is_main_replica(item.replica_id):
            boxes[f"{section}:{item.key}@{_text(item.global_offset)}"] = _with_axes(
                item, item.data.detach()
            )
    return boxes, common


def fill(section: str, state: dict[str, Any], common: Any, stored: StoredBoxes) -> Any:
    """The state dict that load_state_dict takes: `state` (a request of any layout) filled from the
    stored boxes.
    """
    request, local_only, factories = load_preprocess(state)
    sharded, _ = extract_sharded_base(
        request
    )  # plain values of the request give way to the stored ones

    def read(item: Any) -> Any:
        if isinstance(item, ShardedObject):
            return None
        return stored.read(f"{section}:{item.key}", item)

    dict_list_map_inplace(read, sharded)
    merge(common, local_only)
    merge(common, sharded)
    return apply_factory_merges(common, factories)


class StoredBoxes:
    """Reads boxes of a checkpoint by the index of what lies where."""

    def __init__(self, folder: Path, names: Mapping[str, Mapping[str, Iterable[int]]]) -> None:
        """names: file -> {name@offset: shape}, as in the checkpoint's commit."""
        self._folder = folder
        self._boxes: dict[str, list[Box]] = {}
        for file, entries in names.items():
            for entry, shape in entries.items():
                name, offset = entry.rsplit("@", 1)
                self._boxes.setdefault(name, []).append((file, _numbers(offset), tuple(shape)))
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._boxes

    def read(self, name: str, item: ShardedTensor) -> Tensor:
        """The part of tensor `name` that `item` describes, on the CPU.

        Raises:
            CheckpointCorruptError: the checkpoint lacks the tensor, or a part of it.
        """
        shape = (1,) * item.prepend_axis_num + tuple(item.local_shape)
        result = torch.zeros(shape, dtype=item.dtype)
        covered = 0
        for file, offset, size in self._boxes.get(name, ()):
            ranges = [
                (max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(item.global_offset, shape, offset, size, strict=True)
            ]
            if all(start < end for start, end in ranges):
                source = tuple(
                    slice(s - b, e - b) for (s, e), b in zip(ranges, offset, strict=True)
                )
                target = tuple(
                    slice(s - a, e - a)
                    for (s, e), a in zip(ranges, item.global_offset, strict=True)
                )
                result[target] = self._tensor(file, name, offset, source).to(item.dtype)
                covered += result[target].numel()
        # Vocabulary padding differs between layouts; those rows are zero and never read.
        if covered != result.numel() and not (item.allow_shape_mismatch and covered):
            raise CheckpointCorruptError(
                f"{self._folder}: {name} covers {covered} of the {result.numel()} values this rank needs; the checkpoint is of "
                "another model or optimizer. Check model.path and optimizer against RUN/config.json"
            )
        return result.view(tuple(item.local_shape))

    def exact(self, name: str) -> Tensor:
        """A tensor stored in one piece."""
        ((file, offset, _),) = self._boxes[name]
        return self._tensor(file, name, offset, (...,))

    def _tensor(
        self, file: str, name: str, offset: tuple[int, ...], part: tuple[Any, ...]
    ) -> Tensor:
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        entry = f"{name}@{_text(offset)}"
        if not offset or part == (...,):
            return self._open[file].get_tensor(entry)  # type: ignore[no-any-return]
        return self._open[file].get_slice(entry)[part]  # type: ignore[no-any-return]


def encode(value: Any) -> Any:
    """Plain Python with integer keys, tuples and small tensors as JSON; `decode` is the exact
    inverse.
    """
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [encode(v) for v in value]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} cannot be stored in a checkpoint's commit")


def decode(value: Any) -> Any:
    """The inverse of encode."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {decode(k): decode(v) for k, v in value["dict"]}
    if "tuple" in value:
        return tuple(decode(v) for v in value["tuple"])
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))


def entries(file: Path) -> Iterator[tuple[str, list[int]]]:
    """(name@offset, shape) of every box in a file."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            yield name, list(opened.get_slice(name).get_shape())


def _with_axes(item: ShardedTensor, data: Tensor) -> Tensor:
    return data.reshape((1,) * item.prepend_axis_num + tuple(data.shape))


def _text(offset: Iterable[int]) -> str:
    return ",".join(map(str, offset))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")) if text else ()

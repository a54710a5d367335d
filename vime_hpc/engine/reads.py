"""Tensors for vLLM's own loader that know which of their elements it reads, and that may hold no others.

A loader cuts what it is given (narrow, chunk, select, transpose) and copies a part into a parameter. A `PartTensor` follows
these cuts on a tensor without memory; only where elements are really read does it give out those it holds. So one load
tells what an engine rank needs of every tensor, and later loads work when no more than that is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from vime_hpc.errors import WeightsMismatchError
from vime_hpc.weights.engine_layout import RankLayout, Slice
from vime_hpc.weights.safetensors_index import stored_tensors, tensor_specs

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass
class Source:
    """One Hugging Face tensor: its name and shape, the slice that is here, and what was read of it.

    held: contiguous, of the shape of `here`.
    read: the smallest slice around everything read so far; None before anything was.
    unknown: something was read that is no slice (merged dimensions, steps).
    """

    name: str
    shape: tuple[int, ...]
    here: Slice
    held: torch.Tensor
    read: Slice | None = None
    unknown: bool = False

    @property
    def whole(self) -> Slice:
        return Slice((0,) * len(self.shape), self.shape)


class PartTensor(torch.Tensor):
    """A tensor of the whole shape of which a slice is there. Views of it are PartTensors; any other use reads it.

    Raises (where it is read):
        WeightsMismatchError: elements were asked for that are not here.
    """

    _view: torch.Tensor
    _source: Source
    # Subclasses of torch.Tensor without a behaviour of their own above the dispatcher.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, view: torch.Tensor, source: Source) -> PartTensor:
        """
        Args:
            view: tensor on the meta device that lies in one of the source's whole shape as this one does.
        """
        made: PartTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=source.held.device,
        )
        made._view, made._source = view, source
        return made

    @classmethod
    def of(cls, source: Source) -> PartTensor:
        """The whole tensor."""
        return cls(_without_memory(source.shape, source.held.dtype), source)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        first = args[0]
        if isinstance(first, PartTensor) and _may_cut(func):
            viewed, source = first._view, first._source
            found = func(viewed, *args[1:], **(kwargs or {}))
            parts = found if isinstance(found, (tuple, list)) else [found]
            # reshape and contiguous are views only where nothing has to be copied
            if all(torch._C._is_alias_of(part, viewed) for part in parts):  # type: ignore[attr-defined]
                wrapped = [cls(part, source) for part in parts]
                return type(found)(wrapped) if isinstance(found, (tuple, list)) else wrapped[0]
        named = {name: _elements(value) for name, value in (kwargs or {}).items()}
        return func(*map(_elements, args), **named)

    def elements(self) -> torch.Tensor:
        """These elements, from memory."""
        source, view = self._source, self._view
        held = source.held
        if 0 in view.shape:  # a rank whose share of a vocabulary is all padding
            return torch.empty(view.shape, dtype=view.dtype, device=held.device)
        seen = (int(view.storage_offset()), view.shape, view.stride())
        if view.dtype == held.dtype:
            place = _place(*seen, source.shape, source.here)
        else:  # bytes of another type: counted as all of it
            place = _Place(None, source.here == source.whole, seen[2], seen[0])
            held = held.flatten().view(view.dtype)
        if place.part is None:
            source.unknown = True
        else:
            source.read = place.part if source.read is None else source.read.union(place.part)
        if not place.is_here:
            wanted = (
                _words(place.part)
                if place.part
                else f"shape {list(seen[1])}, strides {list(seen[2])}"
            )
            raise WeightsMismatchError(
                f"{source.name}: its elements {wanted} were read, and of {list(source.shape)} {_words(source.here)} was sent "
                f"to this engine rank: the engine's loader reads other parts than it did when it was recorded. "
                f'Set weights.send = "whole"'
            )
        return held.as_strided(view.shape, place.strides, held.storage_offset() + place.offset)


def _may_cut(func: Any) -> bool:
    # `to` counts as a view (in inference mode it arrives here in one piece), but copies between devices
    return bool(func.is_view) and func.overloadpacket is not torch.ops.aten.to


def _elements(value: Any) -> Any:
    if isinstance(value, PartTensor):
        return value.elements()
    return tree_map(_elements, value) if isinstance(value, (list, tuple)) else value


@lru_cache(maxsize=1024)
def _without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _words(part: Slice) -> str:
    ends = (f"{start}:{start + size}" for start, size in zip(part.start, part.shape, strict=True))
    return f"[{', '.join(ends)}]"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the elements of a view lie. part: in the whole tensor, None = they form no slice. strides, offset: in what is here."""

    part: Slice | None
    is_here: bool
    strides: tuple[int, ...] = ()
    offset: int = 0


# Experts have few shapes, and there are thousands of them.
@lru_cache(maxsize=65536)
def _place(
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    whole: tuple[int, ...],
    here: Slice,
) -> _Place:
    """Of a view with this offset, shape and strides in a contiguous tensor of the shape `whole`, of which `here` is there."""
    dimensions = _dimensions(shape, strides, whole)
    part = None if dimensions is None else _part(offset, shape, dimensions, whole)
    if dimensions is None or part is None:
        return _Place(None, here.shape == whole, strides, offset)
    steps = _strides(here.shape)
    inside = (a - b for a, b in zip(part.start, here.start, strict=True))
    return _Place(
        part,
        here.contains(part),
        tuple(0 if d is None else steps[d] for d in dimensions),
        sum(i * step for i, step in zip(inside, steps, strict=True)),
    )


def _dimensions(
    shape: tuple[int, ...], strides: tuple[int, ...], whole: tuple[int, ...]
) -> list[int | None] | None:
    """Along which dimension of the whole tensor each of the view's goes (those of one element: along none)."""
    # Dimensions of one element have a neighbour's stride.
    known = {s: d for d, (n, s) in enumerate(zip(whole, _strides(whole), strict=True)) if n > 1}
    found = [None if n == 1 else known.get(s, -1) for n, s in zip(shape, strides, strict=True)]
    used = [d for d in found if d is not None]
    return None if -1 in used or len(set(used)) < len(used) else found


def _part(
    offset: int, shape: tuple[int, ...], dimensions: list[int | None], whole: tuple[int, ...]
) -> Slice | None:
    start, sizes = [], [1] * len(whole)
    for stride in _strides(whole):
        start.append(offset // stride)
        offset %= stride
    for size, dimension in zip(shape, dimensions, strict=True):
        if dimension is not None:
            sizes[dimension] = size
    found = Slice(tuple(start), tuple(sizes))
    return found if Slice((0,) * len(whole), whole).contains(found) else None


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


@dataclass
class Recording:
    """Hands tensors to a loader, one after another, and then knows what it read of each."""

    tensors: NamedTensors
    sources: list[Source] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            shape = tuple(tensor.shape)
            source = Source(name, shape, Slice((0,) * len(shape), shape), tensor)
            self.sources.append(source)
            yield name, PartTensor.of(source)

    def layout(self, held: int) -> RankLayout:
        """What the load that is now over read. `held`: bytes of the parameters it filled."""
        slices = {}
        for source in self.sources:
            empty = Slice((0,) * len(source.shape), (0,) * len(source.shape))
            found = source.read or empty
            if not source.unknown and source.shape and found != source.whole:
                slices[source.name] = found
        unknown = tuple(s.name for s in self.sources if s.unknown)
        return RankLayout(slices, held, unknown)


def parts_of_whole(
    tensors: NamedTensors, slices: Mapping[str, Slice], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Received parts as tensors of the whole shape; tensors that are whole as they are.

    Args:
        tensors: each of the shape of its slice. slices: of the tensors of which a part was sent.
        shapes: of the whole tensors.
    """
    for name, tensor in tensors:
        if name in slices:
            yield name, PartTensor.of(Source(name, shapes[name], slices[name], tensor))
        else:
            yield name, tensor


def model_tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor an engine of this model is sent, mapped from the directory's files: only what is read is loaded.

    Raises:
        ConfigError: no safetensors file in the directory. CheckpointCorruptError: a file is damaged.
    """
    wanted = tensor_specs(model_dir)
    for file in sorted(model_dir.glob("*.safetensors")):
        mapped = np.memmap(file, np.uint8, mode="c")
        for name, stored in stored_tensors(file).items():
            if name in wanted:
                piece = torch.from_numpy(mapped[stored.start : stored.start + stored.nbytes])
                dtype: torch.dtype = getattr(torch, stored.dtype)
                yield name, piece.view(dtype).view(stored.shape)

"""Tensors for vLLM's own loader that know which of their elements it reads, and that may hold no others.

A loader cuts what it is given (narrow, chunk, select, transpose) and copies a part into a parameter. A `PartTensor` follows
these cuts on a tensor without memory; only where elements are really read does it give out those it holds. So one load
tells what an engine rank needs of every tensor, and later loads work when no more than that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
        view = torch.empty(source.shape, dtype=source.held.dtype, device="meta")
        return cls(view, source)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _may_cut(func) and isinstance(args[0], PartTensor):
            viewed, source = args[0]._view, args[0]._source
            found = func(viewed, *args[1:], **kwargs)
            parts = found if isinstance(found, (tuple, list)) else [found]
            # reshape and contiguous are views only where nothing has to be copied
            if all(torch._C._is_alias_of(part, viewed) for part in parts):  # type: ignore[attr-defined]
                wrapped = [cls(part, source) for part in parts]
                return type(found)(wrapped) if isinstance(found, (tuple, list)) else wrapped[0]
        return func(*tree_map(_elements, args), **tree_map(_elements, kwargs))

    def elements(self) -> torch.Tensor:
        """These elements, from memory."""
        source, view = self._source, self._view
        if 0 in view.shape:  # a rank whose share of a vocabulary is all padding
            return torch.empty(view.shape, dtype=view.dtype, device=source.held.device)
        wanted = slice_of(view, source.shape)
        if wanted is None:
            source.unknown = True
            if source.here != source.whole:
                raise WeightsMismatchError(
                    f"{source.name} was read with shape {list(view.shape)} and strides {list(view.stride())}, which is no "
                    f"slice of it; only {_words(source.here)} of {list(source.shape)} was sent to this engine rank. "
                    f'Set weights.send = "whole"'
                )
            offset = source.held.storage_offset() + view.storage_offset()
            return source.held.as_strided(view.shape, view.stride(), offset)
        source.read = wanted if source.read is None else source.read.union(wanted)
        if not source.here.contains(wanted):
            raise WeightsMismatchError(
                f"{_words(wanted)} of {source.name} was read, and {_words(source.here)} was sent to this engine rank: the "
                f'engine\'s loader reads other parts than it did when it was recorded. Set weights.send = "whole"'
            )
        strides = _strides_in(source.held, view, source.shape)
        inside = (a - b for a, b in zip(wanted.start, source.here.start, strict=True))
        offset = sum(i * s for i, s in zip(inside, source.held.stride(), strict=True))
        return source.held.as_strided(view.shape, strides, source.held.storage_offset() + offset)


def _may_cut(func: Any) -> bool:
    # `to` counts as a view (in inference mode it arrives here in one piece), but copies between devices
    return bool(func.is_view) and func.overloadpacket is not torch.ops.aten.to


def _elements(value: Any) -> Any:
    return value.elements() if isinstance(value, PartTensor) else value


def _words(part: Slice) -> str:
    ends = (f"{start}:{start + size}" for start, size in zip(part.start, part.shape, strict=True))
    return f"[{', '.join(ends)}]"


def slice_of(view: torch.Tensor, shape: tuple[int, ...]) -> Slice | None:
    """The slice of a contiguous tensor of this shape that a view of it holds, in whatever order of dimensions; None where
    the elements form no slice.
    """
    strides, start, left = _strides(shape), [], view.storage_offset()
    for stride in strides:
        start.append(left // stride)
        left %= stride
    sizes = [1] * len(shape)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        dimension = _dimension(stride, shape, strides)
        if dimension is None or sizes[dimension] != 1:
            return None
        sizes[dimension] = size
    found = Slice(tuple(start), tuple(sizes))
    return found if Slice((0,) * len(shape), shape).contains(found) else None


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def _dimension(stride: int, shape: tuple[int, ...], strides: list[int]) -> int | None:
    """The dimension one walks along with this stride. Dimensions of one element have a neighbour's stride."""
    found = (i for i, n in enumerate(shape) if n > 1 and strides[i] == stride)
    return next(found, None)


def _strides_in(held: torch.Tensor, view: torch.Tensor, shape: tuple[int, ...]) -> list[int]:
    """Strides in `held` for the dimensions of a view of the whole tensor."""
    strides = _strides(shape)
    found = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        dimension = None if size == 1 else _dimension(stride, shape, strides)
        found.append(0 if dimension is None else held.stride(dimension))
    return found


@dataclass
class Recording:
    """Hands tensors to a loader, one after another, and then knows what it read of each."""

    tensors: NamedTensors
    held: Callable[[], int]
    """Bytes of the parameters; called when the loader asks for the first tensor."""
    sources: list[Source] = field(default_factory=list)
    num_bytes: int = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(self.tensors):
            if number == 0:
                self.num_bytes = self.held()
            shape = tuple(tensor.shape)
            source = Source(name, shape, Slice((0,) * len(shape), shape), tensor)
            self.sources.append(source)
            yield name, PartTensor.of(source)

    def layout(self) -> RankLayout:
        """What the load that is now over read."""
        slices = {}
        for source in self.sources:
            empty = Slice((0,) * len(source.shape), (0,) * len(source.shape))
            found = source.read or empty
            if not source.unknown and source.shape and found != source.whole:
                slices[source.name] = found
        unknown = tuple(s.name for s in self.sources if s.unknown)
        return RankLayout(slices, self.num_bytes, unknown)


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

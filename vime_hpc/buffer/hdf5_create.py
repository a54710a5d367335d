"""A new HDF5 file of contiguous datasets with dimension scales and plain attributes.

h5py's low-level calls, with types and spaces made once: the high-level ones were most of the time of a small segment
(selections and type objects for each of 50 datasets; `attrs.create` writes under a temporary name and renames).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]
_NOT_A_VARIABLE = "This is a netCDF dimension but not a netCDF variable.%10d"
_SCALAR = h5py.h5s.create(h5py.h5s.SCALAR)


class NewDataset:
    """A dataset of final shape, to be filled block by block."""

    def __init__(
        self, id: h5py.h5d.DatasetID, dtype: np.dtype[Any], shape: tuple[int, ...], descriptor: int
    ) -> None:
        self.id, self.dtype, self.shape = id, dtype, shape
        self._descriptor = descriptor
        self._offset: int | None = None

    def write(self, values: AnyArray, start: int = 0) -> None:
        """Put rows of the stored type at `start` of the first axis."""
        self._check(values)
        if values.shape == self.shape:
            self.id.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
            return
        space = self.id.get_space()
        space.select_hyperslab((start, *(0 for _ in values.shape[1:])), values.shape)
        self.id.write(h5py.h5s.create_simple(values.shape), space, values)

    def write_plane(self, plane: int, start: int, rows: AnyArray) -> None:
        """Put contiguous rows at `start` of the second axis of [planes, rows, K], past HDF5.

        An HDF5 call takes the interpreter lock several times, against the thread that turns the next rows; os.pwrite
        takes it once (about a tenth of the time of appending 126 MB on two cores).
        """
        self._check(rows)
        if self._offset is None:
            self._offset = self._allocate()
        row_bytes = self.shape[2] * self.dtype.itemsize
        offset = self._offset + (plane * self.shape[1] + start) * row_bytes
        left = rows.data.cast("B")
        while left:
            written = os.pwrite(self._descriptor, left, offset)
            left, offset = left[written:], offset + written

    def _allocate(self) -> int:
        """Where the values lie in the file; HDF5 decides it at the first write."""
        space = self.id.get_space()
        one = (1,) * len(self.shape)
        space.select_hyperslab((0,) * len(self.shape), one)
        self.id.write(h5py.h5s.create_simple(one), space, np.zeros(one, self.dtype))
        offset: int = self.id.get_offset()
        return offset

    def _check(self, values: AnyArray) -> None:
        assert values.dtype == self.dtype, (self.id.name, values.dtype, self.dtype)


class NewFile:
    """The file while it is written; complete and closed after the `with`."""

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        """
        Args:
            sizes: length of every dimension by its name; each becomes a dimension scale without values.
        """
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
        # One writer per file by construction, and many cluster file systems have no locks at all.
        access.set_file_locking(False, True)
        # Nothing written may wait in a buffer of HDF5's: it would come over what `write_plane` has put there.
        access.set_sieve_buf_size(0)
        access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_LATEST)
        self.id = h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, fapl=access)
        self.root = h5py.h5g.open(self.id, b"/")
        self._sizes = sizes
        self._types: dict[Any, h5py.h5t.TypeID] = {}
        self._spaces: dict[tuple[int, ...], h5py.h5s.SpaceID] = {}
        self._plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._plan.set_obj_track_times(False)  # equal samples, equal bytes
        self._scales = {name: self._scale(name, size) for name, size in sizes.items()}
        self._descriptor = os.open(path, os.O_WRONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        self.id.close()

    def create(self, name: str, dtype: Any, dimensions: Sequence[str]) -> NewDataset:
        """A dataset over named dimensions, nothing written yet."""
        shape = tuple(self._sizes[key] for key in dimensions)
        dataset = self._dataset(name, np.dtype(dtype), shape)
        for index, key in enumerate(dimensions):
            h5py.h5ds.attach_scale(dataset, self._scales[key], index)
        return NewDataset(dataset, np.dtype(dtype), shape, self._descriptor)

    def set_attribute(
        self, where: h5py.h5g.GroupID | h5py.h5d.DatasetID, name: str, value: Any
    ) -> None:
        """Text as fixed-length UTF-8, numbers as they are; no variable-length types anywhere."""
        if isinstance(value, str):
            data = value.encode("utf-8")
            kind, array = (
                self._text_type(max(len(data), 1)),
                np.array(data, dtype=f"S{max(len(data), 1)}"),
            )
        else:
            array = np.asarray(np.float64(value) if isinstance(value, float) else value)
            kind = self._type(array.dtype)
        h5py.h5a.create(where, name.encode(), kind, _SCALAR).write(array, mtype=kind)

    def _scale(self, name: str, size: int) -> h5py.h5d.DatasetID:
        scale = self._dataset(name, np.dtype(">f4"), (size,))
        h5py.h5ds.set_scale(scale, (_NOT_A_VARIABLE % size).encode())
        return scale

    def _dataset(
        self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> h5py.h5d.DatasetID:
        if shape not in self._spaces:
            self._spaces[shape] = h5py.h5s.create_simple(shape)
        return h5py.h5d.create(
            self.id, name.encode(), self._type(dtype), self._spaces[shape], dcpl=self._plan
        )

    def _type(self, dtype: np.dtype[Any]) -> h5py.h5t.TypeID:
        if dtype not in self._types:
            self._types[dtype] = h5py.h5t.py_create(dtype, logical=True)
        return self._types[dtype]

    def _text_type(self, size: int) -> h5py.h5t.TypeID:
        if size not in self._types:
            kind = h5py.h5t.C_S1.copy()
            kind.set_size(size)
            kind.set_cset(h5py.h5t.CSET_UTF8)
            kind.set_strpad(h5py.h5t.STR_NULLPAD)
            self._types[size] = kind
        return self._types[size]

"""One HDF5 file opened for reading by one process, with nothing in it trusted."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from vime_hpc.errors import BufferCorruptError

AnyArray = npt.NDArray[Any]
BUILTIN_FILTERS = frozenset(
    {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}
)
_SIEVE_BYTES = 4096
"""HDF5 reads this much at least per small piece; its default of 64 KiB would read other layers' rows as well."""


class Handle:
    """A segment opened by one process without locks; refuses whatever leads out of this one file.

    Uses h5py's low-level calls: the high-level ones took three quarters of the time of opening a small segment.
    """

    def __init__(self, path: Path) -> None:
        self.pid = os.getpid()
        self._size = path.stat().st_size
        self._datasets: dict[str, h5py.h5d.DatasetID] = {}
        self.file = _open(path)
        links = self.file.id.links
        for name in list(self.file.id):
            if links.get_info(name).type != h5py.h5l.TYPE_HARD:
                self.file.close()
                raise BufferCorruptError(
                    f"{path}: {name.decode(errors='replace')!r} is a link to another place; segments of a "
                    "buffer have none, so this file was not written by vime-hpc and is refused"
                )

    def dataset(self, name: str, dtype: Any) -> h5py.h5d.DatasetID:
        """A dataset of exactly this type whose data lie in this file behind built-in filters at most."""
        if name not in self._datasets:
            dataset, expected = h5py.h5d.open(self.file.id, name.encode()), np.dtype(dtype)
            if dataset.dtype != expected:
                raise BufferCorruptError(f"{name} has type {dataset.dtype}, expected {expected}")
            properties = dataset.get_create_plist()
            filters = {
                properties.get_filter(index)[0] for index in range(properties.get_nfilters())
            }
            virtual = properties.get_layout() == h5py.h5d.VIRTUAL
            if virtual or properties.get_external_count() or not filters <= BUILTIN_FILTERS:
                raise BufferCorruptError(
                    f"{name} keeps its data in another file or behind a plugin filter; refused"
                )
            if not filters and math.prod(dataset.shape) * expected.itemsize > self._size:
                raise BufferCorruptError(
                    f"{name} claims the shape {dataset.shape}, more than the file's {self._size} bytes"
                )
            self._datasets[name] = dataset
        return self._datasets[name]

    def read(
        self,
        name: str,
        dtype: Any,
        start: tuple[int, ...] | None = None,
        count: tuple[int, ...] | None = None,
    ) -> AnyArray:
        """A block of a dataset, by default all of it."""
        dataset = self.dataset(name, dtype)
        shape = dataset.shape if count is None else count
        values = np.empty(shape, dtype=dtype)
        if values.size:
            space = dataset.get_space()
            if count is not None:
                space.select_hyperslab(start, count)
            dataset.read(h5py.h5s.create_simple(shape), space, values)
        return values

    def stated_digest(self, name: str, dtype: Any) -> int:
        """The attribute xxh3_64 of a dataset."""
        stated = np.zeros((), dtype="<u8")
        h5py.h5a.open(self.dataset(name, dtype), b"xxh3_64").read(stated)
        return int(stated)


def _open(path: Path) -> h5py.File:
    """Without locks. Where someone else in this process (a notebook with h5py or xarray) has the file open, HDF5 demands
    the same access properties of both handles: then as h5py opens files by default, with or without locks."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_sieve_buf_size(_SIEVE_BYTES)
    access.set_file_locking(False, True)
    try:
        return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, access))
    except OSError as error:
        if "doesn't match" not in str(error) and "don't match" not in str(error):
            raise
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "don't match" not in str(error):
            raise
    return h5py.File(path, "r")


def plain(value: Any) -> Any:
    """An attribute as a plain Python value."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return value.item() if isinstance(value, np.generic) else value

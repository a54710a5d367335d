"""Read a sealed segment: only the rows and layers asked for, every one checked against its digest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vime_hpc.buffer.codec import PackedSample, sample_digest, unpack_sample
from vime_hpc.buffer.hdf5_handle import Handle, plain
from vime_hpc.buffer.routed_writer import layer_digests
from vime_hpc.buffer.schema import (
    DIGEST,
    FORMAT,
    FORMAT_VERSION,
    ROUTED,
    ROUTED_DIGEST,
    BufferSchema,
)
from vime_hpc.buffer.segment_writer import header_digest
from vime_hpc.errors import BufferCorruptError
from vime_hpc.types import Sample

AnyArray = npt.NDArray[Any]


class SegmentFile:
    """A sealed segment opened for reading. A forked process opens its own handle at its first read."""

    def __init__(self, path: Path, *, expected_header: str | None = None) -> None:
        """
        Args:
            expected_header: XXH3-64 of the root attributes, as the step's commit has it; None skips that comparison.
        Raises:
            BufferCorruptError: not a whole segment of a known format, or it leads to other files.
        """
        self.path = path
        self._expected_header = expected_header
        self._handle: Handle | None = None
        self._cache: dict[str, AnyArray] = {}
        with self._reading("the header"):
            self.attributes = {
                name: plain(value) for name, value in self._open().file.attrs.items()
            }
        self._check_header()
        self.schema = BufferSchema.from_attributes(self.attributes)
        with self._reading("the scalar columns"):
            self.scalars = self._read_scalars()

    def __len__(self) -> int:
        return len(self.scalars)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def close(self) -> None:
        if self._handle is not None and self._handle.pid == os.getpid():
            self._handle.file.close()
        self._handle = None

    def read(self, first: int, last: int, *, layers: slice | None = None) -> list[Sample]:
        """Samples of rows first..last-1, read in one piece per column, digests checked.

        Args:
            layers: which MoE layers of routed_experts to read; None = all. Others are not touched on disk.
        """
        with self._reading(f"rows {first} to {last - 1}"):
            packed = self._read_rows(first, last, layers)
            return [unpack_sample(self.schema, sample) for sample in packed]

    def column(self, name: str) -> tuple[AnyArray, npt.NDArray[np.int64] | None]:
        """A whole column, checked, and its offsets (None for a scalar one). routed_experts come as [L, rows, K]."""
        routed = name == ROUTED and self.schema.routing is not None
        column = None if routed else self.schema.column(name)
        with self._reading(f"column {name}"):
            if column is None:
                return self._whole_routed(), self._offsets("routed_row_offsets")
            if column.axis == "sample":
                return self.scalars[name], None
            return self._whole(name, column.dtype), self._offsets(column.offsets)

    # --- inside -------------------------------------------------------------------------------------------------

    def _open(self) -> Handle:
        if self._handle is None or self._handle.pid != os.getpid():
            self._handle = Handle(self.path)
        return self._handle

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except BufferCorruptError as error:
            raise BufferCorruptError(
                str(error) if str(self.path) in str(error) else f"{self.path}: {error}"
            ) from error
        except FileNotFoundError as error:
            raise BufferCorruptError(
                f"{self.path}: the segment is missing but its step is committed; "
                "if the directory was copied, copy it again"
            ) from error
        except (
            OSError,
            KeyError,
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            OverflowError,
            MemoryError,
        ) as error:
            locking = os.environ.get("HDF5_USE_FILE_LOCKING", "unset")
            raise BufferCorruptError(
                f"{self.path}: {what} cannot be read: {error!r} (HDF5_USE_FILE_LOCKING is {locking}; segments are read "
                f"without locks). To see what is damaged: vime-hpc buffer verify {self.path.parents[2]}"
            ) from error

    def _check_header(self) -> None:
        attributes = dict(self.attributes)
        if attributes.get("format") != FORMAT:
            raise BufferCorruptError(
                f"{self.path}: format is {attributes.get('format')!r}, expected {FORMAT!r}"
            )
        if attributes.get("format_version") not in range(1, FORMAT_VERSION + 1):
            raise BufferCorruptError(
                f"{self.path}: format version {attributes.get('format_version')!r}; this vime-hpc reads "
                f"1 to {FORMAT_VERSION}. Install a newer one, or the file is damaged"
            )
        stated = attributes.pop("header_xxh3_64", None)
        try:
            found = header_digest(attributes)
        except (TypeError, ValueError) as error:
            raise BufferCorruptError(
                f"{self.path}: root attributes are not plain values: {error}"
            ) from error
        if found != stated or self._expected_header not in (None, found):
            raise BufferCorruptError(
                f"{self.path}: root attributes have digest {found}, expected "
                f"{self._expected_header or stated}; the header was changed after the seal"
            )

    def _read_scalars(self) -> AnyArray:
        num_samples = self._open().dataset(DIGEST, "<u8").shape[0]
        scalars = np.zeros(num_samples, dtype=self.schema.scalar_dtype)
        for column in self.schema.scalars:
            values = self._whole(column.name, column.dtype)
            if len(values) != num_samples:
                raise BufferCorruptError(
                    f"{self.path}: column {column.name} has {len(values)} rows, expected {num_samples}"
                )
            scalars[column.name] = values
        return scalars

    def _whole(self, name: str, dtype: Any) -> AnyArray:
        """A dataset in full, compared with the digest in its attribute."""
        handle = self._open()
        values = handle.read(name, dtype)
        stated, found = (
            handle.stated_digest(name, dtype),
            xxhash.xxh3_64_intdigest(values.data if values.size else b""),
        )
        if found != stated:
            raise BufferCorruptError(
                f"{self.path}: column {name} has digest {found:016x}, expected {stated:016x}; its bytes "
                f"changed after the seal. To see which samples: vime-hpc buffer verify {self.path.parents[2]}"
            )
        return values

    def _offsets(self, name: str) -> npt.NDArray[np.int64]:
        if name not in self._cache:
            offsets = self._whole(name, "<i8")
            if (
                len(offsets) != len(self.scalars) + 1
                or offsets[0] != 0
                or bool((np.diff(offsets) < 0).any())
            ):
                raise BufferCorruptError(
                    f"{self.path}: {name} does not rise from 0 over {len(self.scalars)} samples"
                )
            self._cache[name] = offsets
        return self._cache[name]

    def digests(self) -> AnyArray:
        """[N] uint64, the stated digest of every sample."""
        if DIGEST not in self._cache:
            self._cache[DIGEST] = self._whole(DIGEST, "<u8")
        return self._cache[DIGEST]

    def _read_rows(self, first: int, last: int, layers: slice | None) -> list[PackedSample]:
        handle, flat = self._open(), []
        for column in self.schema.ragged:
            offsets = self._offsets(column.offsets)[first : last + 1]
            values = handle.read(
                column.name, column.dtype, (int(offsets[0]),), (int(offsets[-1] - offsets[0]),)
            )
            flat.append((values, (offsets - offsets[0]).tolist()))
        routed, digests = (
            self._read_routed(first, last, layers)
            if self.schema.routing is not None
            else (None, None)
        )
        packed = []
        for index, row in enumerate(range(first, last)):
            ragged = tuple(values[edges[index] : edges[index + 1]] for values, edges in flat)
            sample = PackedSample(
                int(self.scalars["sample_id"][row]),
                self.scalars[row],
                ragged,
                None if routed is None else routed[index],
            )
            self._check_sample(sample, row, None if digests is None else digests[index])
            packed.append(sample)
        return packed

    def _check_sample(
        self, packed: PackedSample, row: int, digests: npt.NDArray[np.uint64] | None
    ) -> None:
        stated = int(self.digests()[row])
        found = sample_digest(self.schema, packed, digests)
        if found != stated:
            raise BufferCorruptError(
                f"{self.path}: sample {packed.sample_id} (row {row}) has digest {found:016x}, expected {stated:016x}; its bytes "
                f"changed after the seal. To see which column: vime-hpc buffer verify {self.path.parents[2]}"
            )

    def _read_routed(
        self, first: int, last: int, layers: slice | None
    ) -> tuple[list[AnyArray], npt.NDArray[np.uint64]]:
        """Per sample its rows as [T - 1, layers, K], and the digests of all layers [samples, L]."""
        routing = self.schema.routing
        assert routing is not None
        handle, offsets = self._open(), self._offsets("routed_row_offsets")[first : last + 1]
        wanted = range(routing.num_layers)[layers or slice(None)]
        if wanted.step != 1:
            raise ValueError(
                f"layers {layers}: only neighbouring layers in rising order can be read"
            )
        digests = handle.read(ROUTED_DIGEST, "<u8", (first, 0), (last - first, routing.num_layers))
        block = handle.read(
            ROUTED,
            routing.dtype,
            (wanted.start, int(offsets[0]), 0),
            (len(wanted), int(offsets[-1] - offsets[0]), routing.top_k),
        )
        samples = []
        for index in range(last - first):
            rows = slice(int(offsets[index] - offsets[0]), int(offsets[index + 1] - offsets[0]))
            found = layer_digests(block[:, rows])
            wrong = np.flatnonzero(found != digests[index, wanted.start : wanted.stop])
            if wrong.size:
                raise BufferCorruptError(
                    f"{self.path}: sample {int(self.scalars['sample_id'][first + index])} (row {first + index}): {ROUTED} of layer "
                    f"{wanted.start + int(wrong[0])} changed after the seal"
                )
            samples.append(np.ascontiguousarray(block[:, rows].transpose(1, 0, 2)))
        return samples, digests

    def _whole_routed(self) -> AnyArray:
        routing = self.schema.routing
        assert routing is not None
        values = self._open().read(ROUTED, routing.dtype)
        offsets, digests = self._offsets("routed_row_offsets"), self._whole(ROUTED_DIGEST, "<u8")
        for row in range(len(self)):
            if not np.array_equal(
                layer_digests(values[:, offsets[row] : offsets[row + 1]]), digests[row]
            ):
                raise BufferCorruptError(
                    f"{self.path}: {ROUTED} of row {row} changed after the seal"
                )
        return values


def coalesce(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Rising rows as half-open runs of neighbours: [1, 2, 5] -> [(1, 3), (5, 6)]."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs

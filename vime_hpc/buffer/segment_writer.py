"""Write one sealed segment: an HDF5 file of flat columns that anything can open.

Every dataset is contiguous and unfiltered (measured: 4 to 28 times faster than chunked, compressed or vlen layouts), has
its final size from the start, and is filled in batches, so memory stays bounded whatever the step's size.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vime_hpc.buffer.codec import PackedSample, sample_digest
from vime_hpc.buffer.hdf5_create import NewDataset, NewFile
from vime_hpc.buffer.routed_writer import RoutedWriter, row_offsets
from vime_hpc.buffer.schema import (
    DIGEST,
    FORMAT,
    FORMAT_VERSION,
    ROUTED,
    ROUTED_DIGEST,
    STATUS_NAMES,
    BufferSchema,
    canonical_json,
)

_BATCH_BYTES = 32 << 20

Datasets = dict[str, NewDataset]


def write_segment(
    path: Path,
    schema: BufferSchema,
    samples: Sequence[PackedSample],
    header: Mapping[str, Any],
    start_sync: Callable[[], None] | None = None,
) -> str:
    """Write the samples, in the order given, to a new file; returns the XXH3-64 of its header (16 hex digits).

    Args:
        header: run_id, step, worker, num_workers, attempt, producer; become root attributes beside the schema's.
        start_sync: has the file, as far as it is written, forced to the device, and returns at once; called now and then
            during a long write, so that the device works meanwhile. The caller's own sync at the end stays necessary.
    Raises:
        DamagedDataError: an expert id that the model does not have.
        OSError: the device is full or failed; the file is of no use.
    """
    attributes = segment_attributes(schema, header)
    with _write_errors(path):
        _write(path, schema, samples, attributes, start_sync)
    return header_digest(attributes)


def _write(
    path: Path,
    schema: BufferSchema,
    samples: Sequence[PackedSample],
    attributes: Mapping[str, Any],
    start_sync: Callable[[], None] | None,
) -> None:
    sizes = _sizes(schema, samples)
    if schema.routing is None:
        with NewFile(path, sizes) as file:
            datasets = _create(file, schema)
            _write_flat(file, datasets, schema, samples)
            _finish(file, datasets, schema, samples, attributes, None)
        return
    with (
        RoutedWriter(schema.routing, samples, start_sync) as routed,
        NewFile(path, sizes) as file,
    ):
        datasets = _create(file, schema)
        _write_flat(file, datasets, schema, samples)  # while the first batches are being turned
        _fill(file, datasets["routed_row_offsets"], [routed.offsets])
        routed.write(datasets[ROUTED])
        _fill(file, datasets[ROUTED_DIGEST], [routed.digests])
        _finish(file, datasets, schema, samples, attributes, routed.digests)


def _finish(
    file: NewFile,
    datasets: Datasets,
    schema: BufferSchema,
    samples: Sequence[PackedSample],
    attributes: Mapping[str, Any],
    layer_digests: npt.NDArray[np.uint64] | None,
) -> None:
    """Every sample's digest, and the root attributes."""
    digests = np.array(
        [
            sample_digest(schema, packed, None if layer_digests is None else layer_digests[row])
            for row, packed in enumerate(samples)
        ],
        dtype="<u8",
    )
    _fill(file, datasets[DIGEST], [digests])
    for name, value in {**attributes, "header_xxh3_64": header_digest(attributes)}.items():
        file.set_attribute(file.root, name, value)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """HDF5 reports a full disk found at close as RuntimeError with the errno in its text; callers get the OSError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = re.search(r"errno = (\d+)", str(error))
        if isinstance(error, OSError) and (error.errno or not found):
            raise
        code = int(found[1]) if found else errno.EIO
        raise OSError(code, f"{os.strerror(code)} while writing a segment", str(path)) from error


def segment_attributes(schema: BufferSchema, header: Mapping[str, Any]) -> dict[str, Any]:
    """The root attributes of a segment, plain Python values."""
    attributes: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "Conventions": "netCDF-4 dimension scales",
        "status_names": ",".join(STATUS_NAMES),
        "columns": ",".join(schema.column_names),
        "optional_columns": ",".join(schema.optional),
        "sampling_temperature": float(schema.sampling_temperature),
        "logprob_mode": schema.logprob_mode,
        **header,
    }
    if schema.routing is not None:
        attributes |= {
            "num_moe_layers": schema.routing.num_layers,
            "top_k": schema.routing.top_k,
            "num_experts": schema.routing.num_experts,
            "missing_expert": schema.routing.missing,
        }
    return attributes


def header_digest(attributes: Mapping[str, Any]) -> str:
    """XXH3-64 of the canonical JSON of all root attributes but header_xxh3_64 itself."""
    return xxhash.xxh3_64_hexdigest(canonical_json(dict(attributes)))


def _sizes(schema: BufferSchema, samples: Sequence[PackedSample]) -> dict[str, int]:
    """The length of every dimension by its name."""
    sizes = {
        column.dimension: sum(len(packed.ragged[index]) for packed in samples)
        for index, column in enumerate(schema.ragged)
    }
    sizes |= {"sample": len(samples), "sample_edge": len(samples) + 1}
    if schema.routing is not None:
        rows = sum(len(packed.routed) for packed in samples if packed.routed is not None)
        sizes |= {
            "routed_row": rows,
            "moe_layer": schema.routing.num_layers,
            "top_k_place": schema.routing.top_k,
        }
    return sizes


def _create(file: NewFile, schema: BufferSchema) -> Datasets:
    """All datasets with their final shapes, nothing written yet."""
    datasets: Datasets = {}

    def create(name: str, dtype: Any, dimensions: Sequence[str], unit: str, meaning: str) -> None:
        dataset = file.create(name, dtype, dimensions)
        file.set_attribute(dataset.id, "units", unit)
        file.set_attribute(dataset.id, "long_name", meaning)
        datasets[name] = dataset

    for column in schema.scalars:
        create(column.name, column.dtype, ("sample",), column.unit, column.meaning)
    for name, column in schema.offsets_owners.items():
        create(
            name,
            "<i8",
            ("sample_edge",),
            "index",
            f"sample i has entries [i] to [i + 1] of axis {column.dimension}",
        )
    for column in schema.ragged:
        create(column.name, column.dtype, (column.dimension,), column.unit, column.meaning)
    if schema.routing is not None:
        create(
            "routed_row_offsets",
            "<i8",
            ("sample_edge",),
            "index",
            "sample i has rows [i] to [i + 1] of axis routed_row",
        )
        create(
            ROUTED,
            schema.routing.dtype,
            ("moe_layer", "routed_row", "top_k_place"),
            "expert id",
            "experts chosen for a token; a sample has one row per token but the last",
        )
        create(
            ROUTED_DIGEST,
            "<u8",
            ("sample", "moe_layer"),
            "digest",
            "XXH3-64 of the sample's rows in that layer",
        )
    create(
        DIGEST, "<u8", ("sample",), "digest", "XXH3-64 of the sample's stream; see buffer-format.md"
    )
    return datasets


def _write_flat(
    file: NewFile, datasets: Datasets, schema: BufferSchema, samples: Sequence[PackedSample]
) -> None:
    """Scalars, offsets and flat columns, each with the XXH3-64 of its bytes as attribute."""
    table = np.array([packed.scalars for packed in samples], dtype=schema.scalar_dtype)
    for column in schema.scalars:
        _fill(file, datasets[column.name], [np.ascontiguousarray(table[column.name])])
    owners = schema.offsets_owners
    for index, column in enumerate(schema.ragged):
        _fill(file, datasets[column.name], _batches(packed.ragged[index] for packed in samples))
        if owners[column.offsets].name == column.name:
            _fill(
                file,
                datasets[column.offsets],
                [row_offsets(len(packed.ragged[index]) for packed in samples)],
            )


def _batches(arrays: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
    """Neighbouring arrays joined to pieces of about _BATCH_BYTES: one HDF5 call for many samples."""
    waiting: list[npt.NDArray[Any]] = []
    size = 0
    for array in arrays:
        waiting.append(array)
        size += array.nbytes
        if size >= _BATCH_BYTES:
            yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
            waiting, size = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _fill(file: NewFile, dataset: NewDataset, pieces: Iterable[npt.NDArray[Any]]) -> None:
    state, start = xxhash.xxh3_64(), 0
    for piece in pieces:
        if piece.size:
            dataset.write(piece, start)
            state.update(piece.data)
        start += len(piece)
    assert start == dataset.shape[0], (dataset.id.name, start, dataset.shape)
    file.set_attribute(dataset.id, "xxh3_64", np.uint64(state.intdigest()))

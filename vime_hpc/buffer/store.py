"""RolloutBuffer: create a buffer, and look into one afterwards with numpy and h5py alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vime_hpc.buffer.attempts import next_attempt
from vime_hpc.buffer.export import arrow_table, need_module, sample_row, xarray_dataset
from vime_hpc.buffer.files import Disk
from vime_hpc.buffer.index import IDENTITY_FORMAT, Record, encode_record, read_identity
from vime_hpc.buffer.layout import Layout, find_buffer
from vime_hpc.buffer.reader import BufferReader, StepBatch
from vime_hpc.buffer.repair import drop_steps
from vime_hpc.buffer.schema import FORMAT_VERSION, BufferSchema
from vime_hpc.errors import ConfigError
from vime_hpc.types import Sample

log = logging.getLogger(__name__)


class RolloutBuffer:
    """A buffer opened for analysis, or for administration between runs."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.reader = BufferReader(layout.root)
        self.run_id, self.schema = self.reader.run_id, self.reader.schema

    @classmethod
    def create(
        cls, root: Path, *, run_id: str, schema: BufferSchema | None = None, durable: bool = True
    ) -> Self:
        """Make the buffer directory `root`, or open the same one again: any number of processes may call this at once.

        Raises:
            ConfigError: a buffer of another run or schema lies there.
        """
        schema, layout, disk = schema or BufferSchema(), Layout(Path(root)), Disk(durable=durable)
        disk.make_directory(layout.root)
        record = {
            "format": IDENTITY_FORMAT,
            "format_version": FORMAT_VERSION,
            "run_id": run_id,
            "schema": schema.to_json(),
        }
        if not layout.identity.exists():
            aside = layout.root / f"buffer.json.{os.getpid()}.aside"
            disk.write_aside(aside, encode_record(record))
            try:
                os.link(aside, layout.identity)  # unlike rename, fails if another process was first
            except FileExistsError:
                log.debug("buffer: %s was made by another process", layout.identity)
            aside.unlink()
            disk.sync_directory(layout.root)
        for directory in (layout.segments, layout.steps, layout.journal):
            disk.make_directory(directory)
        found_run, found_schema = read_identity(layout)
        if (found_run, found_schema) != (run_id, schema):
            raise ConfigError(
                f"{layout.root}: holds the buffer of run {found_run!r} with {found_schema.to_json()}; this run is "
                f"{run_id!r} with {schema.to_json()}. A changed model or temperature needs a new run directory"
            )
        return cls(layout)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an existing buffer by its directory or its run directory. Raises ConfigError when there is none."""
        return cls(find_buffer(Path(path)))

    def next_attempt(self) -> int:
        """Attempt number for the next start: higher than any that wrote here. One process asks, the others are told."""
        return next_attempt(self.layout)

    # --- looking ----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Committed steps, rising."""
        return self.reader.committed_steps()

    def commit(self, step: int) -> Record:
        return self.reader.commit(step)

    def batch(self, step: int) -> StepBatch:
        """One committed step, its files held open until `close`."""
        return self.reader.batch(step)

    def samples(
        self, first_step: int = 0, last_step: int | None = None
    ) -> Iterator[tuple[int, Sample]]:
        """(step, sample) of a range of steps (last_step included), in sample_id order within a step, digests checked."""
        for step in self._range(first_step, last_step):
            batch = self.batch(step)
            try:
                for start in range(0, len(batch), 64):
                    for sample in batch.read(range(start, min(start + 64, len(batch)))):
                        yield step, sample
            finally:
                batch.close()

    def column(
        self,
        name: str,
        first_step: int = 0,
        last_step: int | None = None,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64] | None]:
        """A whole column over a range of steps: flat values and [samples + 1] offsets (None for one value per sample).

        Rows come in the order of `column("sample_id", ...)`; routed_experts as [layers, rows, top_k].
        """
        values, edges, base = [], [np.zeros(1, dtype=np.int64)], 0
        offsets: npt.NDArray[np.int64] | None = None
        for step in self._range(first_step, last_step):
            batch = self.batch(step)
            part, offsets = batch.column(name)
            batch.close()
            values.append(part)
            if offsets is not None:
                edges.append(offsets[1:] + base)
                base += int(offsets[-1])
        if not values:
            raise ConfigError(
                f"{self.layout.root}: no committed step in {first_step}..{last_step}; committed: {self._span()}"
            )
        joined = np.concatenate(values, axis=1 if values[0].ndim == 3 else 0)
        return joined, None if offsets is None else np.concatenate(edges)

    def to_pandas(self, first_step: int = 0, last_step: int | None = None) -> Any:
        """A pandas DataFrame, one row per sample: scalars, texts, and numpy arrays of the token columns."""
        pandas, rows = need_module("pandas"), list(self._rows(first_step, last_step))
        names = list(dict.fromkeys(name for row in rows for name in row))
        # Texts stay Python objects: pandas 3 keeps strings as Arrow, which refuses lone surrogates.
        return pandas.DataFrame(
            {
                name: pandas.Series(
                    [row.get(name) for row in rows],
                    dtype=object
                    if any(isinstance(row.get(name), str | np.ndarray) for row in rows)
                    else None,
                )
                for name in names
            }
        )

    def to_arrow(self, first_step: int = 0, last_step: int | None = None) -> Any:
        """A pyarrow Table: scalars as columns, flat columns as large lists without a copy of their values."""
        return arrow_table(need_module("pyarrow"), self, list(self._range(first_step, last_step)))

    def to_xarray(self, step: int) -> Any:
        """An xarray Dataset of one step: flat columns, offsets and scalars under the names they have in the file."""
        return xarray_dataset(need_module("xarray"), self, step)

    # --- administration -----------------------------------------------------------------------------------------------

    def drop(self, from_step: int) -> list[str]:
        """Remove the commits, segments and journals of from_step and all later steps; returns what was removed.

        Commits go first, newest first, so that a crash in between leaves a shorter buffer and never a hole.
        Only for a buffer nobody writes to.
        """
        return drop_steps(self.layout, from_step)

    def _range(self, first_step: int, last_step: int | None) -> Iterator[int]:
        return (
            step
            for step in self.steps()
            if first_step <= step and (last_step is None or step <= last_step)
        )

    def _span(self) -> str:
        steps = self.steps()
        return f"{steps[0]}..{steps[-1]}" if steps else "none"

    def _rows(self, first_step: int, last_step: int | None) -> Iterator[dict[str, Any]]:
        for step, sample in self.samples(first_step, last_step):
            # Not in sample_row: JSON lines have null for such a reward, and stay as they are.
            yield {**sample_row(step, sample), "reward_usable": sample.reward is not None}

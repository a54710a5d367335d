"""Prompt files: JSONL or Parquet, one record a prompt, every loss counted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_hpc.errors import ConfigError, PromptDataError

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The records of a file, in its order."""

    path: Path
    records: list[tuple[int, Record]]
    """(physical line of a JSONL file, or row of a Parquet file, from 1; the record)."""
    skipped: list[tuple[int, str]]
    """(line, why) of lines left out because data.skip_bad_lines is on."""


def read_prompt_file(path: str | Path, *, skip_bad_lines: bool = False) -> PromptFile:
    """Read all records.

    Blank lines are allowed. Everything else that is not a JSON object is refused with its line, or
    with skip_bad_lines left out and listed.

    Raises:
        ConfigError: the file is not there or cannot be read.
        PromptDataError: a bad line; a file without records.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name a .jsonl or .parquet file in it")
    if not path.is_file():
        raise ConfigError(
            f"{path}: there is no such prompt file. vime-hpc data make --out {path.parent} makes one"
        )
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path}: the prompt file cannot be read; look at its permissions")
    records: list[tuple[int, Record]] = []
    skipped: list[tuple[int, str]] = []
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    for line, value, problem in rows:
        if not problem and not isinstance(value, dict):
            problem = f"a {type(value).__name__}, not a JSON object"
        if not problem:
            records.append((line, value))
        elif skip_bad_lines:
            skipped.append((line, problem))
        else:
            raise PromptDataError(
                f"{path}, line {line}: {problem}. Mend the line, or set data.skip_bad_lines = true "
                f"to leave such lines out"
            )
    if not records:
        raise PromptDataError(f"{path}: no prompt records ({len(skipped)} lines skipped)")
    return PromptFile(path, records, skipped)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any, str]]:
    """(line, value, what is wrong with it). Only \\n ends a line: U+2028 inside a string must
    not.
    """
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                yield line, json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8")), ""
            except UnicodeDecodeError as error:
                yield line, None, f"not UTF-8 (byte {error.start} of the line)"
            except json.JSONDecodeError as error:
                yield line, None, f"not valid JSON (column {error.colno}: {error.msg})"


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Rows as plain Python values: numpy arrays must not reach a chat template."""
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow, which is not installed; install it, or "
            f"convert the file to JSONL"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            line = 0
            for batch in file.iter_batches():
                for value in batch.to_pylist():
                    line += 1
                    yield line, {k: v for k, v in value.items() if v is not None}, ""
    except (OSError, ValueError) as error:
        raise PromptDataError(f"{path}: not a readable Parquet file ({error})") from error

"""docs/buffer-format.md says what is in the files: its tables equal the schema's, its programs run, nothing is left out."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xxhash

from vime_hpc.buffer.columns import OPTIONAL, RAGGED, SCALARS, Column
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.testing.buffer_suite import make_sample

TESTS = Path(__file__).parents[2]
GOLDEN = TESTS / "golden" / "buffer-v1-all"
SEGMENT = GOLDEN / "segments" / "step-000001" / "worker-0000.e0000.h5"
PAGE = (TESTS.parent / "docs" / "buffer-format.md").read_text()


def table(heading: str) -> list[dict[str, str]]:
    """The first table below a heading, a dictionary per row, backticks removed."""
    part = re.split(r"\n#+ ", PAGE.split(f"# {heading}\n")[1])[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    cells = [
        [cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def programs() -> list[str]:
    return [part.split("```")[0] for part in PAGE.split("```python\n")[1:]]


def run(program: str, path: Path, work: Path) -> subprocess.CompletedProcess[str]:
    (work / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-I", str(work / "program.py"), str(path)], capture_output=True, text=True
    )


def type_of(column: Column) -> str:
    return np.dtype(column.dtype).name


def test_the_page_lists_the_scalar_columns_of_the_schema() -> None:
    documented = [
        (row["dataset"], row["type"], row["unit"])
        for row in table("Scalar columns (dimension `sample`)")
    ]
    assert documented == [(column.name, type_of(column), column.unit) for column in SCALARS]


def test_the_page_lists_the_flat_columns_of_the_schema() -> None:
    documented = [
        (row["dataset"], row["type"], row["offsets"], row["unit"]) for row in table("Flat columns")
    ]
    assert documented == [
        (column.name, type_of(column), column.offsets, column.unit) for column in RAGGED
    ]


def test_the_page_lists_the_optional_columns_of_the_schema() -> None:
    documented = [
        (row["dataset"], row["type"], row["per"], row["fill"], row["offsets"], row["unit"])
        for row in table("Optional columns")
    ]
    assert documented == [
        (
            column.name,
            type_of(column),
            column.axis.replace("_", " "),
            _fill(column),
            "" if column.axis == "sample" else column.offsets,
            column.unit,
        )
        for column in OPTIONAL
    ]


def _fill(column: Column) -> str:
    if column.axis in ("byte", "kept_token"):
        return "nothing"
    assert column.fill is not None
    return "NaN" if np.isnan(column.fill) else str(column.fill)


def test_every_dataset_and_attribute_of_a_file_with_all_columns_is_on_the_page() -> None:
    named = set(re.findall(r"`([^`\n]+)`", PAGE))
    with h5py.File(SEGMENT) as file:
        datasets = {name for name in file if not name.endswith(("_present", "_byte"))}
        assert datasets - named == set()
        assert set(file.attrs) - named == set()
        attributes = {name for dataset in file.values() for name in dataset.attrs}
        assert (
            attributes - named
            == {
                "CLASS",
                "NAME",
                "DIMENSION_LIST",
                "REFERENCE_LIST",
                "_Netcdf4Dimid",
            }
            & attributes
        )
        scales = {name for name in file if file[name].is_scale and not name.endswith("_byte")}
    documented = {name for row in table("A segment") for name in row["dimension"].split("`, `")}
    assert documented - {"X`_byte"} == scales


def test_every_key_of_the_records_is_on_the_page() -> None:
    named = set(re.findall(r"`([^`\n]+)`", PAGE))
    for path in (GOLDEN / "buffer.json", GOLDEN / "steps" / "000002.json"):
        assert set(_keys(json.loads(path.read_text()))) - named == set()


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for entry in value:
            yield from _keys(entry)
    if isinstance(value, dict):
        for key, entry in value.items():
            yield key
            if key not in ("resume_state", "stats"):  # names of the source's and the caller's own
                yield from _keys(entry)


def test_ten_lines_of_h5py_read_a_segment(tmp_path: Path) -> None:
    program = programs()[0]
    assert len(program.strip().splitlines()) <= 10
    out = run(program, SEGMENT, tmp_path)
    assert out.returncode == 0, out.stderr
    wanted = [sample for _, sample in RolloutBuffer.open(GOLDEN).samples(1, 1)]
    assert len(wanted) == 6
    assert out.stdout.splitlines() == [
        " ".join(
            [
                str(sample.sample_id),
                "nan" if sample.reward is None else str(sample.reward),
                str(sample.tokens.tolist()),
                repr(sample.prompt_text),
            ]
        )
        for sample in wanted
    ]


@pytest.mark.parametrize("column", ["top_p_token_ids", "tokens", "reward", "trace_present"])
def test_the_pages_definition_of_a_samples_digest_finds_a_changed_value(
    column: str, tmp_path: Path
) -> None:
    program = programs()[1]
    good = run(program, SEGMENT, tmp_path)
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("is as it was sealed") == 6
    with h5py.File(SEGMENT) as file:
        place = file[column].id.get_offset()
    data = bytearray(SEGMENT.read_bytes())
    data[place] ^= 1
    (tmp_path / "changed.h5").write_bytes(bytes(data))
    bad = run(program, tmp_path / "changed.h5", tmp_path)
    assert "AssertionError" in bad.stderr


def test_the_other_digests_are_what_the_page_says() -> None:
    commit = json.loads((GOLDEN / "steps" / "000001.json").read_text())
    entry = commit["workers"][0]["segment"]
    assert xxhash.xxh3_128_hexdigest(SEGMENT.read_bytes()) == entry["xxh3_128"]
    stated = commit.pop("digest")
    canonical = json.dumps(commit, sort_keys=True, separators=(",", ":"))
    assert xxhash.xxh3_128_hexdigest(canonical.encode()) == stated
    with h5py.File(SEGMENT) as file:
        for name, dataset in file.items():
            if "xxh3_64" in dataset.attrs:
                assert xxhash.xxh3_64_intdigest(dataset[()].tobytes()) == dataset.attrs["xxh3_64"]
            else:
                assert name == "routed_experts" or dataset.is_scale
        header = {
            name: value.decode() if isinstance(value, bytes) else value.item()
            for name, value in file.attrs.items()
        }
    stated = header.pop("header_xxh3_64")
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":"))
    assert xxhash.xxh3_64_hexdigest(canonical.encode()) == stated == entry["header_xxh3_64"]


def test_the_journals_frames_are_what_the_page_says() -> None:
    data = next(GOLDEN.glob("journal/*/*.log")).read_bytes()
    kinds, start = [], 0
    while start < len(data):
        magic, kind, zero, length = struct.unpack_from("<4sB3sQ", data, start)
        payload = data[start + 24 : start + 24 + length]
        assert (magic, zero) == (b"VHJ1", bytes(3))
        digest = struct.unpack_from("<Q", data, start + 16)[0]
        assert xxhash.xxh3_64_intdigest(data[start : start + 16] + payload) == digest
        kinds.append(kind)
        start += 24 + length
    assert kinds == [0, 1]
    assert struct.unpack_from("<qqqQ", payload) == (8, 8, 3, 2)
    schema = RolloutBuffer.open(GOLDEN).schema
    first = make_sample(schema, 8, 0)
    record = np.frombuffer(payload, schema.scalar_dtype, count=1, offset=32)[0]
    assert int(record["sample_id"]) == first.sample_id

"""Six doors of other people's making to one file of rollouts; what they show is what was written."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import duckdb
import h5py
import numpy as np
import pandas
import polars
import pytest
import xarray

from vime_hpc.buffer import RolloutBuffer
from vime_hpc.buffer.export import export
from vime_hpc.buffer.values import nuclei_of
from vime_hpc.types import Sample

GOLDEN = Path(__file__).parents[2] / "golden" / "buffer-v1-all"
STEP = 1
SEGMENT = GOLDEN / "segments" / "step-000001" / "worker-0000.e0000.h5"


@pytest.fixture(scope="module")
def buffer() -> RolloutBuffer:
    return RolloutBuffer.open(GOLDEN)


@pytest.fixture(scope="module")
def samples(buffer: RolloutBuffer) -> list[Sample]:
    return [sample for _, sample in buffer.samples(STEP, STEP)]


def shown_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def flat(samples: list[Sample], name: str) -> np.ndarray:
    return np.concatenate([getattr(sample, name) for sample in samples])


def test_h5py(samples: list[Sample]) -> None:
    with h5py.File(SEGMENT) as file:
        edges = file["response_token_offsets"][:]
        kept, starts = file["kept_token_offsets"][:], file["response_edge_offsets"][:]
        texts = file["response_text_offsets"][:]
        for i, sample in enumerate(samples):
            logprobs = file["rollout_logprobs"][edges[i] : edges[i + 1]]
            assert logprobs.tolist() == sample.rollout_logprobs.tolist()
            text = bytes(file["response_text"][texts[i] : texts[i + 1]])
            assert text.decode("utf-8", "surrogatepass") == sample.response_text
            ids = file["top_p_token_ids"][kept[i] : kept[i + 1]]
            places = file["top_p_token_offsets"][starts[i] : starts[i + 1]]
            sets = [ids[first:last].tolist() for first, last in itertools.pairwise(places)]
            if file["top_p_token_ids_present"][i]:
                assert sets == [nucleus.tolist() for nucleus in nuclei_of(sample) or []]
            else:
                assert sets == [[]] * sample.response_length


def test_h5ls_and_h5dump(buffer: RolloutBuffer, samples: list[Sample]) -> None:
    listed = {line.split()[0]: line for line in shown_by("h5ls", str(SEGMENT)).splitlines()}
    assert set(buffer.schema.column_names) <= set(listed)
    rows = sum(len(sample.tokens) - 1 for sample in samples)
    assert f"{{3, {rows}, 2}}" in listed["routed_experts"]
    header = shown_by("h5dump", "-H", str(SEGMENT))
    assert "H5T_VARIABLE" not in header
    assert header.count('ATTRIBUTE "units"') == header.count('ATTRIBUTE "long_name"') > 50
    # -y leaves out the indices; %.9g tells any two float32 apart.
    numbers = shown_by("h5dump", "-y", "-m", "%.9g", "-d", "/rollout_logprobs", str(SEGMENT))
    data = numbers.split("DATA {")[1].split("}")[0].replace(",", " ").split()
    assert np.array(data, np.float32).tolist() == flat(samples, "rollout_logprobs").tolist()


def test_xarray(buffer: RolloutBuffer, samples: list[Sample]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = xarray.open_dataset(SEGMENT, engine="h5netcdf")
    with data:
        assert dict(data.routed_experts.sizes) == {
            "moe_layer": 3,
            "routed_row": sum(len(sample.tokens) - 1 for sample in samples),
            "top_k_place": 2,
        }
        assert data.tokens.values.tolist() == flat(samples, "tokens").tolist()
        groups = data.reward.groupby(data.group_id).mean()
        wanted = [
            np.mean([s.reward for s in samples if s.group_id == group and s.reward is not None])
            for group in (2, 3)
        ]
        assert groups.values.tolist() == pytest.approx(wanted)  # xarray leaves out NaN
        step = buffer.to_xarray(STEP)
        assert all(step[name].equals(data[name]) for name in buffer.schema.column_names)


@pytest.mark.parametrize("locking", [None, False])
def test_a_notebook_may_have_the_same_file_open(
    locking: bool | None, samples: list[Sample]
) -> None:
    """HDF5 refuses two handles of one process that disagree about locks; a plain h5py.File takes them, the buffer none."""
    with h5py.File(SEGMENT, locking=locking) as file:
        again = [sample for _, sample in RolloutBuffer.open(GOLDEN).samples(STEP, STEP)]
        assert again[0].tokens.tolist() == samples[0].tokens.tolist()
        assert file["tokens"][0] == samples[0].tokens[0]  # still open


def test_pandas(buffer: RolloutBuffer, samples: list[Sample]) -> None:
    frame = buffer.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 18
    here = frame[frame.step == STEP]
    assert here.reward.isna().sum() == 1
    assert here.reward_usable.dtype == bool
    assert here.reward_usable.tolist() == [sample.reward is not None for sample in samples]
    assert here.reward.mean() == pytest.approx(
        np.mean([sample.reward for sample in samples if sample.reward is not None])
    )
    assert [values.tolist() for values in here.tokens] == [s.tokens.tolist() for s in samples]
    assert here.response_text.tolist() == [sample.response_text for sample in samples]
    assert here.advantages.isna().sum() == 1  # the sample that has none


@pytest.fixture(scope="module")
def parquet(buffer: RolloutBuffer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doors") / "rollouts.parquet"
    export(buffer, buffer.steps(), "parquet", path)
    return path


def test_polars(buffer: RolloutBuffer, samples: list[Sample], parquet: Path) -> None:
    frame = polars.read_parquet(parquet)
    assert frame.height == 18
    here = frame.filter(polars.col("step") == STEP)
    assert here["tokens"].to_list() == [sample.tokens.tolist() for sample in samples]
    means = here.select(polars.col("rollout_logprobs").list.mean())["rollout_logprobs"].to_list()
    assert means == pytest.approx([sample.rollout_logprobs.mean() for sample in samples])
    traces = [json.loads(bytes(s.columns["trace"])) if s.columns else None for s in samples]
    assert [text and json.loads(text) for text in here["trace"]] == traces
    memory = polars.from_arrow(buffer.to_arrow(STEP, STEP))
    assert isinstance(memory, polars.DataFrame)
    assert memory["reward"].null_count() == 1
    for name in (*buffer.schema.optional, "routed_experts"):
        assert memory[name].is_null().to_list() == [True] + [False] * 5, name
    assert memory["routed_experts"].to_list()[1] == samples[1].routed_experts.tolist()  # type: ignore[union-attr]


def test_duckdb(samples: list[Sample], parquet: Path) -> None:
    query = f"""
        SELECT avg(reward), count(reward), count(*), sum(len(tokens)), max(list_max(top_p_token_ids))
        FROM '{parquet}' WHERE step = {STEP}"""
    mean, usable, count, tokens, largest = duckdb.sql(query).fetchall()[0]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    assert mean == pytest.approx(np.mean(rewards))
    assert (usable, count) == (5, 6)
    assert tokens == sum(len(sample.tokens) for sample in samples)
    kept = [nuclei_of(sample) for sample in samples]
    assert largest == max(int(ids.max()) for sets in kept if sets for ids in sets if ids.size)


def test_h5glance(buffer: RolloutBuffer, samples: list[Sample]) -> None:
    tree = shown_by(sys.executable, "-m", "h5glance", str(SEGMENT))
    assert all(f"├{name}\t" in tree or f"└{name}\t" in tree for name in buffer.schema.column_names)
    assert f"tokens\t[int32: {sum(len(sample.tokens) for sample in samples)}]" in tree
    column = shown_by(sys.executable, "-m", "h5glance", str(SEGMENT), "rollout_logprobs", "--attrs")
    assert "Contiguous" in column
    assert "units: np.bytes_(b'nat')" in column


def test_the_python_api_needs_numpy_h5py_and_xxhash_alone() -> None:
    """Everything else that is installed is hidden from the import system, as where it is not installed."""
    program = f"""
import sys, importlib.util
allowed = {{"numpy", "h5py", "xxhash", "vime_hpc"}} | sys.stdlib_module_names
class Hide:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and not top.startswith(("_", "mpi4py")):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
from vime_hpc.buffer import RolloutBuffer
buffer = RolloutBuffer.open({str(GOLDEN)!r})
print(buffer.steps(), len(list(buffer.samples())), buffer.column("reward")[0].shape, buffer.column("top_p_token_ids", 1, 1)[0].shape)
for method in (buffer.to_pandas, buffer.to_arrow, lambda: buffer.to_xarray(1)):
    try:
        method()
    except Exception as error:
        print(type(error).__name__, error)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    assert lines[0] == "[0, 1, 2] 18 (18,) (88,)"
    for line, package in zip(lines[1:], ("pandas", "pyarrow", "xarray"), strict=True):
        assert line.startswith(f"ConfigError this needs {package}, which is not installed")

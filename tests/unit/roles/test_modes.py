"""What the parts of a run do alone: fixed weights, metrics without a trainer, a buffer that has to be whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cli.main import main
from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError, DeadlineError, NothingToDoError, RequeueRequested
from vime_hpc.launch.finished_buffer import refuse_unfinished
from vime_hpc.launch.run_directory import refuse_finished
from vime_hpc.observe.metrics import read_metrics
from vime_hpc.protocols import BatchSink
from vime_hpc.roles.finished import PartOfBatch
from vime_hpc.roles.fixed_weights import FixedReceiver, RecordedSink
from vime_hpc.testing.buffer_suite import make_group

TINY = str(Path(__file__).parents[3] / "configs" / "ci" / "tiny.toml")
NEEDED = [
    "--model.path=m",
    "--data.train=t",
    "--observe.tensorboard=false",
    "--rollout.prompts_per_step=1",
]


def config(root: Path, *overrides: str) -> RunConfig:
    return load_config([], [*NEEDED, f"--run.dir={root}", "--run.num_steps=2", *overrides])


def rollout_config(root: Path, *overrides: str) -> RunConfig:
    return config(root, "--run.mode=rollout_only", "--run.wait_timeout_s=0.1", *overrides)


def writers(root: Path, num_workers: int) -> list[BufferWriter]:
    buffer = RolloutBuffer.create(root / "buffer", run_id="r", durable=False)
    attempt = buffer.next_attempt()
    return [
        BufferWriter(root, worker=w, num_workers=num_workers, attempt=attempt, durable=False)
        for w in range(num_workers)
    ]


def append(sink: BatchSink, step: int, group_id: int, reward: float) -> None:
    group = make_group(BufferSchema(), group_id)
    sink.append(step, [group], resume_state={}, stats={"rollout/raw_reward": reward})


@pytest.fixture
def rendezvous(tmp_path: Path) -> Rendezvous:
    directory = tmp_path / "attempt"
    directory.mkdir()
    return Rendezvous.open(directory, b"k" * 32, hosting=True, address="127.0.0.1", timeout_s=20.0)


def recorded(root: Path, sink: BufferWriter) -> RecordedSink:
    return RecordedSink(sink, RunPaths(root), rollout_config(root), "local.0")


def no_stop() -> None:
    return


def test_weights_that_stay_are_there_at_once_until_the_job_is_told_to_stop() -> None:
    told: list[bool] = []

    def check() -> None:
        if told:
            raise RequeueRequested("told to stop")

    receiver = FixedReceiver(check)
    assert [receiver.receive(at_least=step) for step in (0, 7)] == [0, 0]
    told.append(True)
    with pytest.raises(RequeueRequested):
        receiver.receive(at_least=8)


def test_a_step_is_recorded_once_every_worker_has_sealed_it_with_the_stats_of_all(
    tmp_path: Path, rendezvous: Rendezvous
) -> None:
    first, second = writers(tmp_path, 2)
    sink = recorded(tmp_path, first)
    append(sink, 0, 0, 1.0)
    append(sink, 1, 2, 1.0)
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    append(second, 0, 1, 0.0)
    append(second, 1, 3, 0.5)
    sink.finish(rendezvous, no_stop)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["rollout/raw_reward"]) for line in lines] == [(0, 0.5), (1, 0.75)]


def test_the_wait_for_the_last_step_ends_with_the_job_or_names_the_missing_worker(
    tmp_path: Path, rendezvous: Rendezvous
) -> None:
    def stop() -> None:
        raise RequeueRequested("told to stop")

    first, _ = writers(tmp_path, 2)
    sink = recorded(tmp_path, first)
    append(sink, 0, 0, 1.0)
    with pytest.raises(RequeueRequested):
        sink.finish(rendezvous, stop)
    with pytest.raises(DeadlineError, match=r"missing workers \[0, 1\]"):
        sink.finish(rendezvous, no_stop)


def test_a_buffer_that_ends_too_early_is_refused_before_anything_starts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (writer,) = writers(source, 1)
    append(writer, 0, 0, 1.0)
    own = tmp_path / "own"
    options = ["--run.mode=train_only", f"--run.train_from={source}"]
    refuse_unfinished(config(own, *options, "--run.until=1"), own)
    with pytest.raises(ConfigError, match=r"committed up to step 1.*--run\.until=1, or generate"):
        refuse_unfinished(config(own, *options), own)
    with pytest.raises(ConfigError, match="no rollout buffer here"):
        refuse_unfinished(config(own, "--run.mode=train_only"), own)
    with pytest.raises(ConfigError, match=r"goes with run\.mode"):
        config(own, f"--run.train_from={source}")


@pytest.mark.parametrize(
    ("groups", "options", "words"),
    [
        (1, ["--run.num_steps=5"], "5 steps wanted, 3 available"),
        (
            3,
            ["--run.until=3", "--rollout.prompts_per_step=5"],
            "5 prompt groups wanted, 3 available",
        ),
    ],
)
def test_a_shortage_is_refused_with_what_is_wanted_and_available_and_nothing_is_consumed(
    tmp_path: Path, model: Path, groups: int, options: list[str], words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Case C38: no blank is ever trained in place of what is not there."""
    (writer,) = writers(tmp_path / "run", 1)
    for step in range(3):
        batch = [make_group(BufferSchema(), step * groups + number) for number in range(groups)]
        writer.append(step, batch, resume_state={}, stats={})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    words_of_command = [*NEEDED, f"--model.path={model}", f"--run.dir={tmp_path / 'run'}"]
    assert main(["run", TINY, *words_of_command, "--run.mode=train_only", *options]) == 2
    assert words in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda buffer: (buffer / "steps/000001.json").write_text("{"), "000001.json"),
        (
            lambda buffer: next(buffer.glob("segments/step-000001/*")).unlink(),
            "is committed with it",
        ),
        (lambda buffer: cut(next(buffer.glob("segments/step-000001/*"))), "was committed with"),
    ],
    ids=["commit", "missing segment", "cut segment"],
)
def test_damaged_input_is_refused_before_anything_starts_unless_it_is_trained_already(
    tmp_path: Path, model: Path, harm: Callable[[Path], object], words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source, own = tmp_path / "source", tmp_path / "own"
    (writer,) = writers(source, 1)
    for step in range(3):
        append(writer, step, step, 1.0)
    harm(source / "buffer")
    options = ["--run.mode=train_only", f"--run.train_from={source}", "--run.num_steps=3"]
    command = ["run", TINY, *NEEDED, f"--model.path={model}", f"--run.dir={own}", *options]
    assert main(command) == 3
    assert words in capsys.readouterr().err
    assert not own.exists()
    refuse_unfinished(config(own, *options), own, first_step=2)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, '
        '"num_hidden_layers": 2, "intermediate_size": 128}'
    )
    for name in (
        "model.safetensors",
        "tokenizer.json",
    ):  # there, and not read before what is tested here
        (tmp_path / "model" / name).touch()
    return tmp_path / "model"


def test_rollouts_alone_are_finished_when_the_last_step_is_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (writer,) = writers(tmp_path, 1)
    wanted = rollout_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(wanted.model_dump(mode="json")))
    (tmp_path / "attempts" / "local.0").mkdir(parents=True)
    append(writer, 0, 0, 1.0)
    refuse_finished(RunPaths(tmp_path), wanted)
    append(writer, 1, 1, 1.0)
    with pytest.raises(NothingToDoError, match="holds all steps up to 2"):
        refuse_finished(RunPaths(tmp_path), wanted)
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_a_part_of_a_batch_reads_the_samples_of_its_own_table(tmp_path: Path) -> None:
    (writer,) = writers(tmp_path, 1)
    groups = [make_group(BufferSchema(), group_id) for group_id in range(4)]
    writer.append(0, groups, resume_state={}, stats={"a": 1.0})
    whole = RolloutBuffer.open(tmp_path).batch(0)
    rows = np.flatnonzero(whole.table.group_id % 2 == 1)
    part = PartOfBatch(whole, rows, {"b": 2.0})
    assert set(part.table.group_id.tolist()) == {1, 3}
    samples = part.read(range(len(part.table)))
    assert [s.sample_id for s in samples] == part.table.sample_id.tolist()
    assert part.stats == {"a": 1.0, "b": 2.0}
    assert len(part.table) == len(rows)

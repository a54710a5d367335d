"""What a replay refuses before it starts, and the directory it makes; no process is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cli.main import main
from vime_hpc.cli.replay_command import words
from vime_hpc.config.load import load_config
from vime_hpc.errors import CheckpointCorruptError, ConfigError
from vime_hpc.launch.finished_buffer import refuse_unfinished
from vime_hpc.launch.replay import compare, plan_replay, prepare
from vime_hpc.testing.buffer_suite import make_group

NUM_STEPS = 6
ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Six committed steps, checkpoints at 2 and 5, metrics of the steps 0 to 4."""
    root = tmp_path / "run"
    root.mkdir()
    options = ["--model.path=m", "--data.train=t", f"--run.dir={root}", "--run.num_steps=8"]
    options.append("--rollout.prompts_per_step=1")
    config = load_config([], [*options, '--rollout.filters=["unusable"]'])
    (root / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    buffer = RolloutBuffer.create(root / "buffer", run_id="r", durable=False)
    with BufferWriter(root, durable=False) as writer:
        for step in range(NUM_STEPS):
            group = make_group(buffer.schema, step)
            writer.append(step, [group], resume_state={}, stats={})
    for step in (2, 5):
        checkpoint(root, step)
    metrics(root, {step: 0.5 + step for step in range(5)})
    return root


def checkpoint(root: Path, step: int) -> Path:
    folder = root / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "rank-0000.safetensors").write_bytes(b"weights")
    digest = xxhash.xxh3_128_hexdigest(b"weights")
    entry = {"name": "rank-0000.safetensors", "bytes": 7, "xxh3_128": digest}
    (folder / "commit.json").write_text(json.dumps({"next_step": step, "files": [entry]}))
    return folder


def metrics(root: Path, losses: dict[int, float | None]) -> None:
    lines = [
        {"step": s, "time": 1.0, "train/loss": loss, "train/zero": -0.0, "perf/x": 1.0}
        for s, loss in losses.items()
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_new_directory_reads_the_source_s_buffer_and_stops_where_it_is_told(run: Path) -> None:
    replay = plan_replay(run, "2:4", ["--algorithm.eps_clip=0.1", "--optimizer.lr=1e-6"])
    config = replay.config
    assert (config.run.mode, config.run.train_from) == ("train_only", str(run))
    assert (config.run.end_step, config.run.num_steps) == (4, 8), "the schedule stays as it was"
    assert config.checkpoint.export_hf is False
    assert replay.changed == ("--algorithm.eps_clip=0.1",), "the other is what the run had"
    assert replay.out == run.with_name("run-replay-1")
    prepare(replay)
    linked = replay.out / "checkpoints" / "step-000002"
    assert json.loads((linked / "commit.json").read_text())["next_step"] == 2
    (linked / "commit.json").unlink()  # as the new run's pruning does
    assert (run / "checkpoints" / "step-000002" / "commit.json").exists()
    assert not (replay.out / "buffer").exists()
    assert plan_replay(run, None, []).out == run.with_name("run-replay-2")


def test_a_replay_of_a_replay_reads_the_first_run_s_buffer(run: Path) -> None:
    first = plan_replay(run, "0:3", [])
    prepare(first)
    (first.out / "config.json").write_text(json.dumps(first.config.model_dump(mode="json")))
    checkpoint(first.out, 1)
    again = plan_replay(first.out, "1:3", [])
    assert again.config.run.train_from == str(run)
    assert again.source.root == first.out


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("4:", "no checkpoint stands at step 4 .*below is step 2, the nearest above is step 5"),
        ("1:3", "below is step 0, the initial model, the nearest above is step 2"),
        ("0:9", "holds the steps 0 to 5, not 6 to 8"),
        ("3:3", "expected A:B with 0 <= A < B"),
        ("x:3", "expected A:B with 0 <= A < B"),
        ("3", "expected A:B with 0 <= A < B"),
    ],
)
def test_steps_that_cannot_be_replayed_are_refused_with_those_that_can(
    run: Path, steps: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_replay(run, steps, [])
    assert main(["replay", str(run), "--steps", steps]) == 2
    assert "replay:" in capsys.readouterr().err
    assert not run.with_name("run-replay-1").exists()


def test_a_cut_checkpoint_is_damaged_data(run: Path) -> None:
    (run / "checkpoints" / "step-000002" / "rank-0000.safetensors").write_bytes(b"weigh")
    with pytest.raises(CheckpointCorruptError, match="has 5 bytes, its commit says 7"):
        plan_replay(run, "2:", [])


def test_a_cut_segment_of_a_replayed_step_is_damaged_data_and_of_another_step_no_hindrance(
    run: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (segment,) = run.glob("buffer/segments/step-000003/*")
    segment.write_bytes(segment.read_bytes()[:-1])
    assert main(["replay", str(run), "--steps", "2:5", f"--model.path={model}"]) == 3
    assert f"{segment.name}: has" in capsys.readouterr().err
    assert not run.with_name("run-replay-1").exists()
    plan = plan_replay(run, "5:", [])
    refuse_unfinished(plan.config, plan.out, plan.first)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--rollout.temperature=0.5", "trains on samples that are there"),
        ("--run.dir=x", "the directory by --out"),
        ("--rollout.filters=[]", "the groups it dropped are not in the buffer"),
        ("--algorithm.kl_loss_coef=0.1", "the checkpoint at step 2 has no reference model"),
        ("--algorithm.eps_clipp=0.1", "did you mean algorithm.eps_clip"),
    ],
)
def test_what_a_replay_cannot_change_is_refused(run: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_replay(run, "2:", [override])


def test_a_directory_inside_the_run_or_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the run that is only read"):
        plan_replay(run, None, [], run / "replay")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(ConfigError, match="holds another run"):
        prepare(plan_replay(run, None, [], other))


def test_the_comparison_is_of_bits_and_knows_what_was_not_recorded(run: Path) -> None:
    replay = plan_replay(run, "2:", [], run.with_name("new"))
    prepare(replay)
    last_place: Any = 3.5 + 2**-51
    metrics(replay.out, {2: 2.5, 3: last_place, 4: 4.5, 5: 5.5})
    rows = {(row.step, row.metric): row.equal for row in compare(replay)}
    assert [rows[step, "train/loss"] for step in (2, 3, 4, 5)] == [True, False, True, None]
    assert (3, "perf/x") not in rows
    text = words(replay, compare(replay))
    assert "1 of 6 metrics differ" in text.splitlines()[-1]
    assert "with nothing changed" in text.splitlines()[-1]
    metrics(run, {2: None, 3: last_place, 4: 4.5})
    assert [row.equal for row in compare(replay) if row.step == 2] == [False, True]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, '
        '"num_hidden_layers": 2, "intermediate_size": 128}'
    )
    (tmp_path / "model" / "model.safetensors").touch()
    return tmp_path / "model"


def test_the_launcher_prints_a_job_of_trainers_alone_and_writes_nothing(
    run: Path, model: Path, tmp_path: Path
) -> None:
    options = [
        "--steps=2:4",
        "--cluster=configs/clusters/generic.toml",
        "--cluster.slurm.qos=debug",
    ]
    options += [f"--model.path={model}", "--algorithm.eps_clip=0.1", "--dry-run"]
    new = tmp_path / "new"
    words = [sys.executable, "launchers/submit_replay.py", str(run), str(new), *options]
    answer = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "component 0 trainer: 1 node, ranks 0..0: 1 trainer" in answer.stderr
    for line in ("#SBATCH --qos=debug", 'mode = "train_only"', "until = 4", "eps_clip = 0.1"):
        assert line in answer.stdout
    assert not new.exists()
    wrong = [*words, "--rollout.top_k=3"]
    answer = subprocess.run(wrong, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (answer.returncode, "Traceback" in answer.stderr) == (2, False)

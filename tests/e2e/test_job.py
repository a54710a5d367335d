"""The whole job with every part real: Megatron-Core trains, vLLM generates, the bridge carries weights, HDF5 keeps rollouts.

Each test that starts a job costs about 30 s on two cores; what can be asked of one finished job is asked of `reference`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vime_hpc.buffer.store import RolloutBuffer

from .conftest import STEPS, Job, Task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
EXACT = (
    "train/loss",
    "train/grad_norm",
    "rollout/raw_reward",
    "train/train_rollout_logprob_abs_diff",
)


def samples_of(run: Path) -> list[tuple]:
    """Everything of every sample that a deterministic run must repeat."""
    return [
        (
            step,
            s.sample_id,
            s.seed,
            s.tokens.tobytes(),
            s.rollout_logprobs.tobytes(),
            s.reward,
            s.versions,
        )
        for step, s in RolloutBuffer.open(run).samples()
    ]


def weights_of(run: Path) -> str:
    return hashlib.sha256((run / "export" / "model.safetensors").read_bytes()).hexdigest()


def processes_of(run: Path) -> list[str]:
    """Command lines of living processes that belong to a run directory."""
    return list(_processes(run).values())


def pids_of(run: Path) -> list[int]:
    return sorted(_processes(run))


def _processes(run: Path) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.name != str(os.getpid()):
                command = (entry / "cmdline").read_bytes()
                if str(run).encode() in command + (entry / "environ").read_bytes():
                    found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked
    return {pid: command for pid, command in found.items() if command}


def test_the_job_trains_on_policy_and_the_engine_serves_the_trainers_weights(
    reference: Job,
) -> None:
    assert reference.code == 0, reference.output
    metrics = reference.metrics
    assert [m["step"] for m in metrics] == list(range(STEPS))
    for m in metrics:  # after every publish: the engine's own samples, under the trainer's weights
        assert m["train/train_rollout_logprob_max_diff"] < 1e-4
        assert m["staleness/max"] == 0
        assert m["weights/nbytes"] > 0
    assert metrics[0]["train/ppo_kl"] < 1e-8
    assert any(m["train/grad_norm"] > 0 for m in metrics)


def test_every_sample_carries_the_version_that_made_it_and_one_mask_and_logprob_a_token(
    reference: Job,
) -> None:
    buffer = RolloutBuffer.open(reference.run)
    assert buffer.steps() == list(range(STEPS))
    count = 0
    for step, sample in buffer.samples():
        count += 1
        assert [span.version for span in sample.versions] == [step]
        assert len(sample.loss_mask) == len(sample.rollout_logprobs) == sample.response_length
        assert (sample.rollout_logprobs <= 0).all()
        assert sample.reward is not None
    assert count == STEPS * 8 * 4


def test_held_out_prompts_are_evaluated_before_and_after_and_are_never_trained_on(
    reference: Job, task: Task
) -> None:
    lines = [
        json.loads(line)
        for line in (reference.run / "eval" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [0, STEPS]
    held_out = {json.loads(line)["prompt"] for line in (task.root / "data" / "eval.jsonl").open()}
    trained = "".join(s.prompt_text for _, s in RolloutBuffer.open(reference.run).samples())
    assert held_out
    assert not any(prompt in trained for prompt in held_out)


def test_the_exported_policy_loads_in_transformers_and_differs_from_the_first(
    reference: Job, task: Task
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(reference.run / "export")
    first = AutoModelForCausalLM.from_pretrained(task.root / "model")
    assert AutoTokenizer.from_pretrained(reference.run / "export").eos_token
    changed = [
        n
        for (n, a), (_, b) in zip(trained.named_parameters(), first.named_parameters(), strict=True)
        if not (a == b).all()
    ]
    assert len(changed) == len(list(first.parameters()))


def test_the_same_seed_gives_the_same_run_bit_for_bit_and_a_second_job_is_refused(
    reference: Job, task: Task, wait_until: Callable[..., None]
) -> None:
    run = task.root / "again"
    process = task.start(run)
    wait_until((run / "lock.json").exists, 60, process)
    wait_until(lambda: bool((run / "lock.json").read_text()), 60, process)
    second = subprocess.run(
        task.arguments(run), capture_output=True, text=True, timeout=120, check=False
    )
    assert second.returncode == 2
    assert "in use by job local.0" in second.stderr
    assert process.wait(280) == 0
    assert samples_of(run) == samples_of(reference.run)
    again = Job(run, 0, "").metrics
    assert [[m[k] for k in EXACT] for m in again] == [
        [m[k] for k in EXACT] for m in reference.metrics
    ]
    assert weights_of(run) == weights_of(reference.run)


def test_a_job_killed_by_sigkill_comes_back_bit_for_bit(
    reference: Job, task: Task, wait_until: Callable[..., None]
) -> None:
    run = task.root / "killed"
    process = task.start(run, "--checkpoint.interval=1")
    wait_until(lambda: bool(list(run.glob("checkpoints/step-000001/commit.json"))), 200, process)
    began = time.monotonic()
    os.killpg(
        process.pid, signal.SIGKILL
    )  # launcher only: the roles are in process groups of their own
    process.wait()
    wait_until(lambda: not processes_of(run), 20)
    gone_after = time.monotonic() - began
    assert task.run(run, "--checkpoint.interval=1").code == 0
    assert samples_of(run) == samples_of(reference.run)
    assert weights_of(run) == weights_of(reference.run)
    assert gone_after < 10


def test_a_job_killed_at_random_moments_ends_like_the_uninterrupted_one(
    reference: Job, task: Task, wait_until: Callable[..., None]
) -> None:
    """Everything at once or one process of it, three times, anywhere between the start and the end of a whole run.

    Engines are not started again here (test_rejoin.py), so that each kill ends the job.
    """
    seed = int(time.time())
    print(f"seed {seed}")  # shown when the test fails
    rng, run = random.Random(seed), task.root / "anywhere"
    for _ in range(3):
        process = task.start(run, "--checkpoint.interval=1", "--engine.max_restarts=0")
        end = time.monotonic() + rng.uniform(1, 30)
        while time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
        victims = pids_of(run)
        for pid in victims if rng.random() < 0.5 else rng.sample(victims, min(1, len(victims))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(60)
        wait_until(lambda: not processes_of(run), 30)
    last = task.run(run, "--checkpoint.interval=1")
    assert last.code in (0, 4), last.output  # 4: it had ended before the last kill
    assert samples_of(run) == samples_of(reference.run)
    assert weights_of(run) == weights_of(reference.run)
    trained = {
        line["step"]: line for line in last.metrics
    }  # a step after the last checkpoint is trained again
    assert sorted(trained) == list(range(STEPS))
    for before, after in zip(reference.metrics, (trained[n] for n in range(STEPS)), strict=True):
        assert [after[key] for key in EXACT] == [before[key] for key in EXACT]


def test_ctrl_c_ends_everything_within_ten_seconds_and_a_warning_signal_saves_first(
    reference: Job, task: Task, wait_until: Callable[..., None]
) -> None:
    run = task.root / "stopped"
    process = task.start(run)
    wait_until((run / "metrics.jsonl").exists, 200, process)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(60) == 75, run.with_suffix(".out").read_text()
    assert list(run.glob("checkpoints/step-*/commit.json"))
    process = task.start(run)
    wait_until(lambda: bool(list(run.glob("attempts/local.1/logs/engine-0.vllm.log"))), 60, process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    wait_until(lambda: not processes_of(run), 10)
    assert time.monotonic() - began < 10
    assert task.run(run).code == 0
    assert samples_of(run) == samples_of(reference.run)
    assert weights_of(run) == weights_of(reference.run)
    starts = sorted((run / "attempts").iterdir())
    assert task.run(run).code == 4, "a finished run has nothing to do"
    assert sorted((run / "attempts").iterdir()) == starts


def test_two_engines_behind_the_router_and_tensor_parallel_ranks_learn_the_same(
    reference: Job, task: Task
) -> None:
    job = task.run(
        task.root / "wide", "--engine.num_engines=2", "--trainer.tp=2", "--run.num_steps=2"
    )
    assert job.code == 0, job.output
    assert (task.root / "wide" / "attempts" / "local.0" / "logs" / "router-0.log").exists()
    for m in job.metrics:
        assert m["train/train_rollout_logprob_max_diff"] < 1e-4
    first, wide = reference.metrics[0], job.metrics[0]
    np.testing.assert_allclose(wide["train/grad_norm"], first["train/grad_norm"], rtol=1e-3)
    assert [s[:5] for s in samples_of(task.root / "wide")][:32] == [
        s[:5] for s in samples_of(reference.run)
    ][:32]


def test_pipeline_stages_tensor_parallel_engine_ranks_and_one_step_ahead(task: Task) -> None:
    options = ("--trainer.pp=2", "--engine.tp=2", "--rollout.max_weight_lag=1")
    job = task.run(task.root / "ahead", *options)
    assert job.code == 0, job.output
    assert max(m["staleness/max"] for m in job.metrics) <= 1
    # No sample is on-policy here: a fixed prompt's logprobs, after every publish.
    assert all(m["weights/probe_logprob_abs_diff"] < 1e-4 for m in job.metrics)
    # Of the fuller rank: vLLM fills the vocabulary up from 288 to 320 rows, all of them on the other one.
    assert all(m["weights/received_over_held"] == 1.0 for m in job.metrics)
    assert job.metrics[0]["train/train_rollout_logprob_max_diff"] < 1e-4


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["--model.path=/nowhere"], 2, "is not a directory"),
        (
            ["--trainer.tp=3", "--trainer.num_ranks=3"],
            2,
            "trainer.tp = 3 does not divide the model's 4 attention heads",
        ),
        (["--data.prompt_key=question"], 2, "no key 'question'"),
        (["--trainer.tpp=2"], 2, "did you mean trainer.tp?"),
        (["--vllm-max-num-seq=2"], 2, "max-num-seqs"),
        (["--run.dir=/proc/run"], 2, "cannot be written"),
    ],
)
def test_bad_input_is_one_message_and_an_exit_code_and_nothing_is_written(
    task: Task, tmp_path: Path, overrides: list[str], code: int, words: str
) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        task.arguments(run, *overrides), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not run.exists()


def test_a_broken_line_of_a_prompt_file_is_named_and_nothing_is_written(
    task: Task, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(
        '{"prompt": "a", "label": "b"}\n\n{"prompt": "x"\n{"prompt": "c", "label": "d"}\n'
    )
    run = tmp_path / "run"
    done = subprocess.run(
        task.arguments(run, f"--data.train={broken}"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "line 3" in done.stderr
    assert "broken.jsonl" in done.stderr
    assert not run.exists()


def test_help_answers_at_once_and_needs_no_torch() -> None:
    code = (
        "import sys, vime_hpc.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'vllm', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "exit codes" in done.stdout

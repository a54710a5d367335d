"""Whatever ends a start, the run comes back to the same result; what cannot come back says so and stops."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_jobs import Job, slurm, stub_spec, wait_until
from stub_work import generated, group_ids, state_after

from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cli.main import main
from vime_hpc.errors import RunLockedError
from vime_hpc.launch.attempts import exit_codes
from vime_hpc.launch.sbatch import render

Submit = Callable[..., Job]
LAG_STEPS = 30
HELD = {"rank": "rollout-0", "step": 3, "do": "hold"}
"""Three steps are trained, the fourth is half generated: there the first start stays until the test's event."""


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of six steps generated and trained once each, in order, worked out without any job."""
    root = tmp_path_factory.mktemp("uninterrupted") / "buffer"
    buffer = RolloutBuffer.create(root, run_id="stub", durable=False)
    trained = []
    with BufferWriter(root, durable=False) as writer:
        for step in range(6):
            groups = [generated(writer.schema, group_id, step) for group_id in group_ids(step)]
            writer.append(step, groups, resume_state={}, stats={})
            trained.append((step, buffer.batch(step).content_digest(), 0))
    return state_after(trained)


def test_the_warning_signal_saves_and_requeues(submit: Submit, uninterrupted: str) -> None:
    job = submit(fault=HELD)
    job.wait_steps(3)
    slurm("scancel", "--signal=USR2", job.id)
    assert job.finish() == {"COMPLETED"}
    first, second = job.attempts
    assert (first.cause, first.verdict, second.cause) == ("asked to stop", "again", "finished")
    assert first.at_end is not None
    assert second.at_begin.checkpoint_step == 3
    assert job.state_digest() == uninterrupted


def test_the_warning_signal_to_the_batch_script_is_handed_on(
    submit: Submit, uninterrupted: str
) -> None:
    job = submit("--cluster.shape=split", fault=HELD)
    job.wait_steps(3)
    slurm("scancel", "--batch", "--signal=USR2", job.id)
    assert job.finish() == {"COMPLETED"}
    assert job.attempts[0].cause == "asked to stop"
    assert job.state_digest() == uninterrupted


def test_a_warning_during_start_kills_nobody(submit: Submit) -> None:
    job = submit("--run.num_steps=2", step_s=1.0)
    wait_until(
        lambda: (job.paths.attempt(f"{job.id}.0") / "job.env").exists(),
        "the first start is prepared",
        60,
    )
    senders = []
    for _ in range(15):
        senders.append(subprocess.Popen(["scancel", "--signal=USR2", job.id]))
        time.sleep(0.1)
    for sender in senders:  # while a job is completing, scancel tries again for a minute and a half
        sender.kill()
        sender.wait()
    assert job.finish() == {"COMPLETED"}
    assert all(attempt.cause in ("asked to stop", "finished") for attempt in job.attempts)


def test_requeue_by_hand_comes_back(submit: Submit, uninterrupted: str) -> None:
    job = submit(fault=HELD)
    job.wait_steps(3)
    slurm("scontrol", "requeue", job.id)
    assert job.finish() == {"COMPLETED"}
    causes = [attempt.cause for attempt in job.attempts]
    assert causes == ["killed from outside", "finished"], (job.attempts[1].reason, job.log)
    assert job.attempts[1].name.endswith(".1")
    assert job.state_digest() == uninterrupted


@pytest.mark.parametrize(
    ("shape", "victim"), [("het", "trainer-0"), ("separate", "engine-0"), ("split", "rollout-0")]
)
def test_sigkill_of_a_task_ends_the_start_and_the_run_comes_back(
    shape: str, victim: str, submit: Submit, uninterrupted: str
) -> None:
    job = submit(f"--cluster.shape={shape}", fault=HELD)
    job.wait_steps(3)
    job.kill_rank(victim)
    assert job.finish() == {"COMPLETED"}
    first = job.attempts[0]
    assert (first.cause, first.verdict) == ("crash", "again")
    assert f"{victim} was killed by SIGKILL" in first.reason
    assert job.state_digest() == uninterrupted


def test_killed_part_by_part_at_lag_2_nothing_is_lost_and_nothing_is_done_twice(
    submit: Submit,
) -> None:
    """SIGKILL at moments from a seed (VIME_KILL_SEED repeats them)."""
    seed = int(os.environ.get("VIME_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"VIME_KILL_SEED={seed}")
    rng = random.Random(seed)
    job = submit(
        "--rollout.max_weight_lag=2",
        f"--run.num_steps={LAG_STEPS}",
        step_s=0.3,
        fault={"rank": "rollout-0", "step": 6, "do": "hold", "starts": 4},
    )
    for start, victim in enumerate(("engine-0", "rollout-0", "trainer-0")):
        job.wait_up(victim, start)
        time.sleep(rng.uniform(0.0, 1.2))
        job.kill_rank(victim, start)
    job.wait_up("rollout-0", 3)
    time.sleep(rng.uniform(0.0, 1.2))
    slurm("scontrol", "requeue", job.id)
    assert job.finish() == {"COMPLETED"}, job.log
    assert [attempt.cause for attempt in job.attempts] == [
        *["crash"] * 3,
        "killed from outside",
        "finished",
    ]

    buffer = RolloutBuffer.open(job.run)
    assert buffer.steps() == list(range(LAG_STEPS))
    commits = sorted(job.paths.checkpoints.glob("step-*/commit.json"))
    trained = json.loads(commits[-1].read_text())["trained"]
    assert [(step, digest) for step, digest, _ in trained] == [
        (step, buffer.batch(step).content_digest()) for step in range(LAG_STEPS)
    ], "every committed batch is trained once, in order, as it lies on the disk"
    lags = {lag for _, _, lag in trained}
    assert lags <= {0, 1, 2}
    assert lags != {0}, "it did run ahead"
    made = [int(line) for line in (job.run / "generated.log").read_text().splitlines()]
    assert len(made) == len(set(made)), "an acknowledged group is not generated again"
    groups = [group for step in range(LAG_STEPS) for group in buffer.batch(step).table.group_id]
    assert sorted(set(groups)) == list(range(LAG_STEPS * 4))
    assert set(made) <= set(groups), "what was acknowledged is there"


def test_a_hanging_task_does_not_outlive_another_ones_failure(submit: Submit) -> None:
    job = submit(
        "--cluster.shape=separate",
        "--cluster.requeue=never",
        '--cluster.components.rollout.roles=["engine", "rollout"]',
        "--run.num_steps=1000",
        fault={"rank": "engine-0", "step": 2, "do": "hang"},
    )
    job.wait_steps(3)
    job.kill_rank("trainer-0")
    assert "FAILED" in job.finish(timeout_s=180), "a hanging task sleeps for 600 s"
    codes = exit_codes(job.paths, f"{job.id}.0")
    assert codes["trainer-0"] == 137
    # It did hang: TERM did not end it. KILL goes to its shell as well, which may or may not come to write the code.
    assert codes.get("engine-0") in (None, 137)


def test_sigkill_of_the_batch_script_is_no_good_end_and_submitting_again_goes_on(
    submit: Submit, uninterrupted: str
) -> None:
    job = submit(fault=HELD)
    job.wait_steps(3)
    script = subprocess.run(
        ["pgrep", "-f", f"job{int(job.id):05d}/slurm_script"], capture_output=True, text=True
    )
    os.kill(int(script.stdout.split()[0]), signal.SIGKILL)
    assert "COMPLETED" not in job.finish()
    again = submit(run=job.run)
    assert again.finish() == {"COMPLETED"}
    assert [attempt.cause for attempt in again.attempts] == ["killed from outside", "finished"]
    assert again.state_digest() == uninterrupted


def test_the_job_ends_by_itself_before_the_limit_although_no_rank_reacts(
    submit: Submit, uninterrupted: str
) -> None:
    """Limit 60 s, forced end 40 s before it; Slurm itself would requeue nothing at the limit."""
    job = submit(
        "--cluster.time=00:01:00",
        "--cluster.signal_delay_s=15",
        "--cluster.end_margin_s=40",
        step_s=1.0,
        fault={"rank": "trainer-0", "step": 3, "do": "hang"},
    )
    assert job.finish(timeout_s=150) == {"COMPLETED"}
    first = job.attempts[0]
    assert (first.cause, first.verdict) == ("time limit", "again")
    assert first.ended is not None
    assert first.end_time is not None
    assert first.ended < first.end_time
    assert job.state_digest() == uninterrupted


def test_the_time_limit_stops_every_start_in_time_and_the_run_comes_to_the_same_end(
    submit: Submit, uninterrupted: str
) -> None:
    """Limit 60 s, warned 50 s before it (Slurm: up to 60 s earlier): 10 s a start at most for 15 s of steps."""
    job = submit(
        "--cluster.time=00:01:00",
        "--cluster.signal_delay_s=50",
        "--cluster.end_margin_s=5",
        "--cluster.max_restarts_without_progress=20",
        step_s=1.7,
    )
    assert job.finish(timeout_s=240) == {"COMPLETED"}, job.log
    *stopped, last = job.attempts
    assert stopped
    assert last.cause == "finished"
    for start in stopped:
        assert (start.cause, start.verdict) == ("time limit", "again")
        assert start.ended is not None
        assert start.end_time is not None
        assert start.ended < start.end_time - 5
    assert job.state_digest() == uninterrupted


def test_a_dead_node_gives_the_run_another_start_elsewhere(
    submit: Submit, cluster: Path, uninterrupted: str
) -> None:
    job = submit(fault=HELD)
    host = str(job.wait_up("engine-0")["host"])
    job.wait_steps(3)
    pid_file = cluster / "run" / f"slurmd-{host}.pid"
    pids = [int(pid_file.read_text()), *_step_daemons(job.id, host)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job.kill_rank("engine-0")
    try:
        assert job.finish(timeout_s=120) == {"COMPLETED"}
    finally:
        subprocess.run(
            ["bash", str(Path(__file__).parent / "slurm-up.sh")],
            check=True,
            capture_output=True,
            timeout=120,
        )
    assert len(job.attempts) == 2
    assert job.wait_up("engine-0", restart=1)["host"] != host
    assert job.state_digest() == uninterrupted


def _step_daemons(job_id: str, host: str) -> list[int]:
    """slurmstepd of a node: they belong to the network namespace of its slurmd, or share ours."""
    found = subprocess.run(
        ["pgrep", "-f", f"slurmstepd: \\[{job_id}\\."], capture_output=True, text=True
    ).stdout.split()
    return [int(pid) for pid in found if _hostname_of(int(pid)) in (host, None)]


def _hostname_of(pid: int) -> str | None:
    answer = subprocess.run(
        ["nsenter", f"--uts=/proc/{pid}/ns/uts", "hostname"], capture_output=True, text=True
    )
    return answer.stdout.strip() or None


def test_a_controller_that_restarts_while_a_rank_dies_costs_no_restart(
    submit: Submit, cluster: Path, uninterrupted: str
) -> None:
    job = submit(fault=HELD)
    job.wait_steps(3)
    victim = job.wait_up("rollout-0")["pid"]
    pid = int((cluster / "run" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    try:
        wait_until(lambda: _is_gone(pid), "the controller has ended", 60)
        os.kill(victim, signal.SIGKILL)
        wait_until(
            lambda: "rollout-0" in exit_codes(job.paths, f"{job.id}.0"),
            "the rank's end is told",
            60,
        )
    finally:
        subprocess.run(
            ["bash", str(Path(__file__).parent / "slurm-up.sh")],
            check=True,
            capture_output=True,
            timeout=120,
        )
    assert job.finish() == {"COMPLETED"}, job.log
    assert [attempt.cause for attempt in job.attempts] == ["crash", "finished"]
    assert job.state_digest() == uninterrupted


def _is_gone(pid: int) -> bool:
    """Ended; PID 1 of a container reaps late."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_preemption_comes_back_and_uses_up_no_budget(submit: Submit, uninterrupted: str) -> None:
    job = submit(
        "--cluster.components.trainer.partition=low",
        "--cluster.components.rollout.partition=low",
        "--cluster.max_restarts=0",
        "--cluster.max_restarts_without_progress=0",
        fault=HELD,
    )
    job.wait_steps(3)
    slurm(
        "sbatch",
        "--partition=high",
        "--nodelist=n3",
        "--exclusive",
        "--time=1",
        "--output=/dev/null",
        "--wrap=sleep 3",
    )
    assert job.finish(timeout_s=120) == {"COMPLETED"}
    assert job.attempts[0].cause in ("asked to stop", "killed from outside")
    assert job.state_digest() == uninterrupted


def test_a_configuration_error_is_not_tried_again(submit: Submit) -> None:
    job = submit(fault={"rank": "rollout-0", "step": 1, "do": "config"})
    assert "FAILED" in job.finish()
    (only,) = job.attempts
    assert (only.cause, only.verdict) == ("cannot go on", "stop")
    assert "option x is wrong" in only.reason
    assert "stopping: rollout-0" in job.log


def test_restarts_without_progress_end(submit: Submit) -> None:
    job = submit(
        "--cluster.max_restarts_without_progress=1",
        fault={"rank": "rollout-0", "step": 1, "do": "exit 7", "starts": 9},
        step_s=0.05,
    )
    assert "FAILED" in job.finish()
    # The rank that commits fails itself: the first start brings step 0, the two after it nothing. Were it the trainer
    # that fails, how many steps the worker commits meanwhile would hang on the machine's load.
    assert len(job.attempts) == 3
    assert "2 starts in a row without a new step or checkpoint" in job.attempts[-1].reason


def test_where_requeue_is_not_allowed_a_new_job_follows(submit: Submit, uninterrupted: str) -> None:
    job = submit("--cluster.requeue=chain", fault=HELD)
    job.wait_steps(3)
    slurm("scancel", "--signal=USR2", job.id)
    job.finish()
    wait_until(lambda: len(job.attempts) == 2, "a second job started", 120)
    following = Job(job.attempts[1].name.split(".")[0], job.run, job.spec)
    assert following.id != job.id
    assert following.finish() == {"COMPLETED"}
    assert job.state_digest() == uninterrupted


def test_moved_and_submitted_with_another_shape_and_more_ranks_it_goes_on(
    submit: Submit, uninterrupted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit("--cluster.requeue=never", fault=HELD)
    job.wait_steps(3)
    slurm("scancel", "--signal=USR2", job.id)
    assert "COMPLETED" not in job.finish()
    assert (job.attempts[0].cause, job.attempts[0].verdict) == ("asked to stop", "stop")

    moved = tmp_path / "other disk" / "run"
    moved.parent.mkdir()
    job.run.rename(moved)
    more = ("--trainer.num_ranks=2", "--rollout.num_workers=2", "--engine.num_engines=2")
    assert main(["resume-plan", str(moved), *more, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    again = submit(*more, "--cluster.shape=split", run=moved)
    assert again.finish() == {"COMPLETED"}, again.log
    assert again.attempts[1].at_begin.checkpoint_step == planned["next_step"] == 3
    assert again.state_digest() == uninterrupted


def test_a_second_job_on_the_same_directory_is_refused_and_names_the_first(submit: Submit) -> None:
    job = submit("--run.num_steps=1000")
    job.wait_steps(1)
    with pytest.raises(RunLockedError, match=f"job {job.id}.0"):
        submit(run=job.run)
    script = job.run / "second.sbatch"
    script.write_text(
        render(stub_spec(job.run, "--run.num_steps=1000", "--cluster.components.trainer.nodelist="))
    )
    second = Job(slurm("sbatch", "--parsable", str(script)).strip(), job.run, job.spec)
    assert "FAILED" in second.finish()
    assert f"is in use by job {job.id}.0" in second.log
    assert job.states() == {"RUNNING"}
    assert [attempt.name for attempt in job.attempts] == [f"{job.id}.0"]


def test_a_finished_run_says_nothing_to_do(submit: Submit) -> None:
    job = submit("--run.num_steps=1")
    assert job.finish() == {"COMPLETED"}
    slurm("sbatch", "--parsable", str(job.paths.attempt(f"{job.id}.0") / "job.sbatch"))
    wait_until(
        lambda: any("nothing to do" in path.read_text() for path in job.run.glob("slurm-*.log")),
        "the second job said so",
        60,
    )

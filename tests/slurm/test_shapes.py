"""Every launch shape gives every rank the same place, on a real Slurm whose nodes have addresses of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_jobs import Job, slurm, stub_spec, wait_until

from vime_hpc.launch.sbatch import render

WIDE = (
    "--trainer.num_ranks=2",
    "--engine.num_engines=2",
    "--rollout.num_workers=2",
    "--cluster.components.rollout.nodes=2",
    "--cluster.components.trainer.gpus_per_node=2",
    "--cluster.components.rollout.gpus_per_node=4",
    "--cluster.components.trainer.cpus_per_task=3",
)
SHAPES = ["het", "step", "split", "separate"]


def places(job: Job) -> dict[str, dict[str, object]]:
    directory = job.paths.attempt(f"{job.id}.0") / "places"
    return {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_hosts_and_gpus_are_as_described_in_every_shape(
    shape: str, submit: Callable[..., Job]
) -> None:
    job = submit(*WIDE, f"--cluster.shape={shape}", step_s=0.02)
    assert job.finish() == {"COMPLETED"}
    found = places(job)
    assert {
        name: (place["global_rank"], place["world_size"], place["local_rank"])
        for name, place in found.items()
    } == {
        "trainer-0": (0, 6, 0),
        "trainer-1": (1, 6, 1),
        "engine-0": (2, 6, 0),
        "engine-1": (3, 6, 0),
        "rollout-0": (4, 6, 1),
        "rollout-1": (5, 6, 1),
    }
    hosts = {name: place["host"] for name, place in found.items()}
    # n3 is the first host of component 0 and the last of any sorted list.
    assert hosts["trainer-0"] == hosts["trainer-1"] == "n3"
    assert hosts["engine-0"] == hosts["rollout-0"] != hosts["engine-1"] == hosts["rollout-1"]
    assert len(set(hosts.values())) == 3
    if (
        shape != "split"
    ):  # there the allocation is one, and every node has as many GPUs as the largest wants
        assert found["trainer-0"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert found["engine-1"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert "done: every task ended well" in job.log


def test_where_spanning_steps_are_forbidden_het_says_so_and_separate_runs(
    cluster: Path, submit: Callable[..., Job]
) -> None:
    conf = cluster / "etc" / "slurm.conf"
    before = conf.read_text()
    conf.write_text(
        before.replace("SchedulerParameters=", "SchedulerParameters=disable_hetjob_steps,")
    )
    try:
        slurm("scontrol", "reconfigure")
        refused = submit(
            "--cluster.max_restarts_without_progress=0",
            run=cluster.parent / f"{cluster.name}-refused",
        )
        assert "FAILED" in refused.finish()
        assert "span multiple components" in refused.log
        assert submit("--cluster.shape=separate").finish() == {"COMPLETED"}
    finally:
        conf.write_text(before)
        slurm("scontrol", "reconfigure")


def test_sbatch_on_the_printed_script_does_the_same_job(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAULT", "null")
    spec = stub_spec(tmp_path / "run", "--run.num_steps=2")
    script = tmp_path / "printed.sbatch"
    script.write_text(render(spec))
    job = Job(slurm("sbatch", "--parsable", str(script)).strip(), tmp_path / "run", spec)
    assert job.finish() == {"COMPLETED"}
    assert len(job.state_digest()) == 64
    wait_until(
        lambda: not job.processes(),
        "nothing of the job is left, the clock of its limit neither",
        20,
    )


def test_awkward_names_reach_slurm_and_the_file_system_unharmed(
    submit: Callable[..., Job], tmp_path: Path
) -> None:
    name = 'it\'s a "run" [1-3] $HOME #7 \\n %j'
    job = submit(
        f"--cluster.slurm.job_name={json.dumps(name)}",
        "--run.num_steps=1",
        run=tmp_path / "a [b] 'c' $d \"e\" %t",
    )
    shown = slurm("squeue", "-h", "-t", "all", "-j", job.id, "-o", "%j").splitlines()
    assert job.finish() == {"COMPLETED"}
    assert set(shown) == {name}
    assert (job.run / "checkpoints" / "step-000001" / "commit.json").exists()


def test_a_service_runs_beside_the_ranks_and_ends_with_them(submit: Callable[..., Job]) -> None:
    job = submit(
        "--cluster.components.sandbox.command=echo sandbox on $(hostname); sleep 600.25",
        "--cluster.components.sandbox.nodes=1",
        "--cluster.components.sandbox.nodelist=n2",
    )
    assert job.finish() == {"COMPLETED"}
    log = job.paths.attempt(f"{job.id}.0") / "logs" / "sandbox.log"
    assert log.read_text().splitlines()[0] == "sandbox on n2"
    wait_until(lambda: not job.processes(), "the service is gone with the job", 20)


def test_gloo_over_all_ranks_meets_at_the_published_address(submit: Callable[..., Job]) -> None:
    job = submit("--run.num_steps=1", program=Path(__file__).parent / "gloo_rank.py")
    assert job.finish(timeout_s=150) == {"COMPLETED"}, job.log
    sums = [json.loads(path.read_text())["sum"] for path in job.run.glob("sum-*.json")]
    assert sums == [6.0, 6.0, 6.0]

"""The script that goes to Slurm: golden files, awkward names, and what must never be missing from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vime_hpc
from vime_hpc.config.load import build_config, load_config
from vime_hpc.errors import ConfigError
from vime_hpc.launch.allocation import directive
from vime_hpc.launch.job import JobSpec, describe, job_spec, seconds_of
from vime_hpc.launch.sbatch import render
from vime_hpc.launch.toml_text import toml_text

GOLDEN = Path(__file__).parents[2] / "golden"
GPU = [
    "--trainer.num_ranks=16",
    "--engine.num_engines=4",
    "--engine.tp=2",
    "--rollout.num_workers=2",
    "--cluster.components.trainer.nodes=2",
    "--cluster.components.trainer.gpus_per_node=8",
    "--cluster.components.trainer.cpus_per_task=14",
    "--cluster.components.rollout.nodes=1",
    "--cluster.components.rollout.gpus_per_node=8",
    "--cluster.components.rollout.cpus_per_task=14",
]
CASES = {
    "het": GPU,
    "separate": [*GPU, "--cluster.shape=separate"],
    "step": [*GPU, "--cluster.shape=step"],
    "split": [*GPU, "--cluster.shape=split"],
    "one_node": [
        '--cluster.components.all.roles=["trainer", "engine", "rollout"]',
        "--cluster.components.all.gpus_per_node=4",
        "--cluster.shape=split",
    ],
    "engines_only": [
        "--run.mode=rollout_only",
        "--engine.num_engines=4",
        "--cluster.components.rollout.nodes=2",
        "--cluster.components.rollout.gpus_per_node=4",
    ],
    "service": [
        *GPU,
        "--cluster.components.sandbox.command=serve --name 'a b'",
        "--cluster.components.sandbox.nodes=2",
        "--cluster.components.sandbox.partition=cpu",
        "--cluster.slurm.account=proj",
        "--cluster.mpi=pmi2",
        "--cluster.slurm.exclusive=true",
        '--cluster.setup=["module load cuda"]',
    ],
    "chain": [
        *GPU,
        "--cluster.requeue=chain",
        "--cluster.gpu_request=gres",
        "--cluster.socket_ifname=hsn0",
    ],
    "awkward": [
        '--run.dir=/scratch/it\'s "a" [run] $HOME @RUN@ %j',
        "--cluster.slurm.job_name=a \"b\" 'c' [1-3] \\n #",
        "--cluster.python=apptainer exec --nv '/my images/v.sif' python",
        '--data.train=/d/\u00fc "q" \\ x.jsonl',
    ],
}


def spec_of(overrides: list[str]) -> JobSpec:
    config = load_config(
        [],
        [
            "--model.path=/models/m",
            "--data.train=/data/t.jsonl",
            "--run.dir=/scratch/run",
            "--cluster.python=python",
            *overrides,
        ],
    )
    return job_spec(config, directory=Path("/home/me"))


@pytest.mark.parametrize("name", CASES)
def test_script_is_the_golden_one(name: str) -> None:
    text = render(spec_of(CASES[name]))
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("VIME_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), (
        f"VIME_WRITE_GOLDEN=1 pytest {__file__} writes the new text; read the difference first"
    )


@pytest.mark.parametrize("name", CASES)
def test_bash_accepts_the_script(name: str) -> None:
    subprocess.run(["bash", "-n", str(GOLDEN / f"{name}.sbatch")], check=True)


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_in_the_script_is_the_run_s(name: str) -> None:
    spec = spec_of(CASES[name])
    match = re.search(r"<<'CONFIG' \|\| exit\n(.*?)\nCONFIG\n", render(spec), re.DOTALL)
    assert match
    assert build_config(tomllib.loads(match[1])) == spec.config


def test_two_components_have_one_hetjob_line_and_a_het_group_each_with_its_own_sizes() -> None:
    text = render(spec_of(GPU))
    before, after = text.split("#SBATCH hetjob\n")
    assert "--nodes=2\n#SBATCH --ntasks=16" in before
    assert "--gpus-per-node=8" in before
    assert "--nodes=1\n#SBATCH --ntasks=6" in after
    assert re.findall(r"--het-group=(\d)", text) == ["0", "1"]


@pytest.mark.parametrize("name", ["het", "separate", "step", "split"])
def test_every_srun_says_cpus_per_task_and_kill_on_bad_exit(name: str) -> None:
    text = render(spec_of(CASES[name]))
    commands = re.findall(r"(?:^srun|^  --het-group|^  --kill).*", text, re.MULTILINE)
    assert len(commands) == (1 if name == "split" else 2)
    assert all(
        "--cpus-per-task=14" in command and "--kill-on-bad-exit=1" in command
        for command in commands
    )


BINDS = {
    "het": ["cores", "none"],
    "separate": ["cores", "none"],
    "step": ["cores", "none"],
    "split": ["none"],
    "one_node": ["none"],
}


@pytest.mark.parametrize("name", BINDS)
def test_trainer_ranks_are_bound_to_cores_and_what_shares_a_step_with_them_frees_them(
    name: str,
) -> None:
    text = render(spec_of(CASES[name]))
    assert re.findall(r"--cpu-bind=(\S+)", text) == BINDS[name]
    assert ("block:block" in text) == (len(BINDS[name]) == 2)
    assert not re.search(r"--gpu-bind|--gpus-per-task", text), "every rank sees its node's GPUs"


def test_a_step_of_trainer_ranks_alone_is_bound_and_a_component_s_own_word_goes_first() -> None:
    alone = ["--run.mode=train_only", "--trainer.num_ranks=4"]
    assert "--cpu-bind=cores " in render(spec_of(alone))
    own = [*GPU, "--cluster.components.trainer.cpu_bind=map_cpu:49,57", '--cluster.srun=["-v"]']
    text = render(spec_of(own))
    assert re.findall(r"--cpu-bind=(\S+)", text) == ["map_cpu:49,57", "none"]
    assert text.index("--cpu-bind=map_cpu") < text.index(" -v ")


def test_the_job_name_reaches_the_line_quoted_as_sbatch_reads_it() -> None:
    assert directive("job-name", 'a "b" \\n') == '#SBATCH --job-name="a \\"b\\" \\\\n"'
    assert directive("nodelist", "n[1-3],g7") == "#SBATCH --nodelist=n[1-3],g7"
    assert directive("requeue", True) == "#SBATCH --requeue"


def test_a_python_in_a_directory_with_a_space_is_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/home/me/my env/bin/python")
    text = render(spec_of(["--cluster.python="]))
    assert "python=('/home/me/my env/bin/python')\n" in text
    container = render(spec_of(["--cluster.python=apptainer exec 'my image.sif' python"]))
    assert "python=(apptainer exec 'my image.sif' python)\n" in container


def test_no_secret_and_no_fixed_port_is_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = render(spec_of(GPU))
    assert "hf_secret" not in text
    assert not re.search(r"MASTER_PORT|29500", text)


def test_the_layout_says_what_comes_back() -> None:
    assert "requeue on preemption: yes, on time-out: yes, on a crash: yes" in "\n".join(
        describe(spec_of(GPU))
    )
    assert "at most 3 in a row without progress" in "\n".join(describe(spec_of(GPU)))
    assert "requeue on preemption: no" in "\n".join(describe(spec_of(["--cluster.requeue=never"])))


def test_engines_are_dealt_round_the_nodes_and_trainer_ranks_fill_them() -> None:
    spec = spec_of(
        [
            "--trainer.num_ranks=4",
            "--cluster.components.trainer.nodes=2",
            "--engine.num_engines=2",
            "--rollout.num_workers=3",
            "--cluster.components.rollout.nodes=2",
        ]
    )
    assert [component.ranks_of_nodes() for component in spec.components] == [
        [[0, 1], [2, 3]],
        [[4, 6, 8], [5, 7]],
    ]


T, R = "--cluster.components.trainer.", "--cluster.components.rollout."


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--trainer.num_ranks=3", f"{T}nodes=2", f"{R}nodes=1"],
            "num_ranks = 3 does not divide over",
        ),
        ([f"{T}nodes=4", f"{R}nodes=1"], "only 1 tasks run there.*trainer.num_ranks"),
        (
            ["--trainer.num_ranks=8", f"{T}gpus_per_node=4", f"{R}nodes=1"],
            "8 trainer on a node need 8",
        ),
        (
            ["--engine.tp=8", f"{T}nodes=1", f"{R}gpus_per_node=4"],
            "1 engine on a node need 8.*engine.tp",
        ),
        ([f"{R}nodes=1"], "no component runs the role trainer"),
        (
            [
                '--cluster.components.a.roles=["engine", "rollout"]',
                '--cluster.components.b.roles=["trainer"]',
            ],
            "have to stand in that order",
        ),
        (
            [
                '--cluster.components.a.roles=["trainer"]',
                '--cluster.components.b.roles=["trainer"]',
            ],
            "in two components",
        ),
        (["--cluster.shape=step", f"{T}partition=x", f"{R}partition=y"], "differ in partition"),
        (["--cluster.shape=split", f"{T}cpu_bind=cores", f"{R}nodes=1"], "differ in cpu_bind"),
        (["--cluster.shape=separate", "--cluster.mpi=pmi2"], "needs all ranks in one step"),
        (["--cluster.time=5"], "not longer than cluster.signal_delay_s"),
        (["--cluster.time=soon"], "is no Slurm time"),
        (["--cluster.python=run 'it"], "cannot be split into words .No closing quotation"),
        (["--cluster.time=-5"], "'-5' is no Slurm time"),
        (["--cluster.slurm.acount=x"], "acount is no sbatch option; did you mean account"),
        (["--cluster.slurm.output=x"], "this is set through run.dir"),
        (["--cluster.slurm.array=1-3"], "a run is one job"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_submitted(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(overrides)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("01:00:00", 3600),
        ("1-0", 86400),
        ("2-12:30", 217800),
        ("1-00:00:01", 86401),
    ],
)
def test_slurm_times(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


def test_toml_text_reads_back() -> None:
    tree = {
        "a": 1,
        "b": {"c": 'x\n"\\\u007f\u00e9', "d": {"e": [1.5, True, {"f": "g"}]}, "h.i": {}},
        "j": {"k": {"l": False}},
    }
    assert tomllib.loads(toml_text(tree)) == tree


def fake(folder: Path, name: str) -> Path:
    """A command on PATH that writes its words, one a line, into the file returned."""
    words = folder / f"{name}.words"
    command = folder / "bin" / name
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>"{words}"\n')
    command.chmod(0o755)
    return words


def test_a_run_directory_that_the_batch_host_cannot_write_is_told_through_slurm(
    tmp_path: Path,
) -> None:
    """There is no log to say it in, and --output is /dev/null."""
    words = fake(tmp_path, "scontrol")
    script = tmp_path / "job.sbatch"
    script.write_text(render(spec_of(["--run.dir=/dev/null/run"])))
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    answer = subprocess.run(
        ["bash", str(script)], env=os.environ | {"SLURM_JOB_ID": "7", "PATH": path}, check=False
    )
    assert answer.returncode == 2
    update, job, comment = words.read_text().splitlines()
    assert (update, job) == ("update", "jobid=7")
    assert comment.startswith("comment=vime-hpc /dev/null/run/slurm-7.log cannot be written on ")


def test_python_in_the_job_takes_its_own_modules_and_not_those_of_the_current_directory(
    tmp_path: Path,
) -> None:
    work, run = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    (work / "json.py").write_text("raise SystemExit('json.py of the current directory')\n")
    fake(tmp_path, "scontrol")
    srun = tmp_path / "bin" / "srun"  # looks for what a rank would import
    srun.write_text(
        f'#!/bin/sh\necho "$VIME_IMPORT_FROM" >{tmp_path}/from; echo "$@" >{tmp_path}/args\n'
    )
    srun.chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(render(spec_of([f"--run.dir={run}", f"--cluster.python={sys.executable}"])))
    environment = os.environ | {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(vime_hpc.__file__).parents[1]),
        "PYTHONSAFEPATH": "",
    }
    subprocess.run(["bash", str(script)], env=environment, cwd=work, check=False, timeout=60)
    log = (run / "slurm-7.log").read_text()
    assert "of the current directory" not in log
    assert "vime-hpc: start 7.0" in log
    assert (tmp_path / "from").read_text() == f"{work}\n"  # the user's other modules are found
    assert "-P -m vime_hpc.roles" in (tmp_path / "args").read_text()


def restarted(tmp_path: Path, refusals: list[str]) -> tuple[int, list[str]]:
    """Run the script's part after the verdict "again" with a scontrol that refuses with these words first."""
    spec = spec_of(["--run.dir=/scratch/run"])
    text = render(spec)
    part = text[text.index('if [ "$verdict" = 75 ]') :]
    (tmp_path / "bin").mkdir()
    (tmp_path / "refusals").write_text("".join(f"{line}\n" for line in refusals))
    calls, left = tmp_path / "calls", tmp_path / "refusals"
    commands = {
        "scontrol": f'echo scontrol >>"{calls}"; read -r line <"{left}" || exit 0; '
        f'tail -n +2 "{left}" >"{left}.new"; mv "{left}.new" "{left}"; echo "$line" >&2; exit 1',
        "sbatch": f'echo sbatch >>"{calls}"',
        "sleep": f'echo sleep >>"{calls}"',
    }
    for name, body in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "VIME_ATTEMPT": "/scratch/run/attempts/7.0",
    }
    answer = subprocess.run(["bash", "-c", "verdict=75\n" + part], env=environment, check=False)
    return answer.returncode, calls.read_text().split()


AWAY = "slurm_requeue error: Unable to contact slurm controller (connect failure)"


def test_a_controller_that_cannot_be_reached_is_asked_to_requeue_again(tmp_path: Path) -> None:
    assert restarted(tmp_path, [AWAY, AWAY]) == (75, ["scontrol", "sleep"] * 2 + ["scontrol"])


def test_where_requeue_is_refused_a_new_job_follows_at_once(tmp_path: Path) -> None:
    refused = ["Requested operation is presently disabled for job 7"]
    assert restarted(tmp_path, refused) == (75, ["scontrol", "sbatch"])


def test_a_clock_whose_sleep_is_ended_with_the_job_does_nothing_more(tmp_path: Path) -> None:
    """Slurm ends all processes of a job, the sleep before its shell now and then; a scancel then would hit the next start."""
    text = render(spec_of(["--run.dir=/scratch/run"]))
    part = text[text.index("# A scancel that is refused") : text.index("# 3. Start the tasks")]
    program = part + 'pause 600 || { echo ended; exit; }\necho "went on"\n'
    words = fake(tmp_path, "sleep")  # ends at once, badly
    (tmp_path / "bin" / "sleep").write_text("#!/bin/sh\nkill -TERM $$\n")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    answer = subprocess.run(
        ["bash", "-c", program], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert answer.stdout == "ended\n", (answer, words)

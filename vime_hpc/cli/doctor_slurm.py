"""`vime-hpc doctor --cluster`: Slurm's settings, and the request against its partitions."""

from __future__ import annotations

import re
import shutil
import subprocess

from vime_hpc.cli.doctor_finding import Finding
from vime_hpc.config.cluster import ClusterConfig, unchanged
from vime_hpc.launch.job import Component, JobSpec, seconds_of
from vime_hpc.launch.sbatch import render

SINFO = "%R|%l|%D|%c|%m|%G"
MIB = {"": 1.0, "M": 1.0, "K": 1 / 1024, "G": 1024.0, "T": 1024.0**2}


def cluster(spec: JobSpec) -> list[Finding]:
    """Slurm's settings, and the request against its partitions."""
    if not shutil.which("sbatch"):
        return [Finding("bad", "Slurm", "there is no sbatch here; run this on a login node")]
    version = subprocess.run(
        ["sbatch", "--version"], capture_output=True, text=True, timeout=30
    ).stdout.strip()
    answer = subprocess.run(
        ["scontrol", "show", "config"], capture_output=True, text=True, timeout=30
    )
    if answer.returncode:
        return [
            Finding(
                "bad",
                "Slurm",
                f"{version or 'its commands are here'}, but the controller does not answer: {' '.join(answer.stderr.split())}",
            )
        ]
    settings = read_settings(answer.stdout)
    findings = [
        Finding("good", "Slurm", version),
        *_het(spec, settings),
        *_requeue(spec, settings),
        Finding(
            "good" if _accounting(settings) else "note",
            "accounting",
            settings.get("AccountingStorageType", "?")
            + ("" if _accounting(settings) else ": status does without sacct"),
        ),
    ]
    for partition in sorted({component.options.partition for component in spec.components}):
        findings += _partition(partition, spec)
    placeholders = unchanged(spec.cluster)
    findings += [
        Finding("bad", "cluster file", f"{name} still says CHANGE") for name in placeholders
    ]
    return [*findings, _test_only(spec)]


def read_settings(text: str) -> dict[str, str]:
    """What `scontrol show config` prints, as a table; a setting may be empty, which must not swallow the next line."""
    return dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))


def _accounting(settings: dict[str, str]) -> bool:
    return "slurmdbd" in settings.get("AccountingStorageType", "")


def _het(spec: JobSpec, settings: dict[str, str]) -> list[Finding]:
    parameters = settings.get("SchedulerParameters", "")
    forbidden = "disable_hetjob_steps" in parameters and "enable_hetjob_steps" not in parameters
    findings = []
    if forbidden and spec.cluster.shape == "het" and spec.is_het:
        findings.append(
            Finding(
                "bad",
                "het steps",
                "steps may not span components here (disable_hetjob_steps); set "
                'cluster.shape = "separate"',
            )
        )
    else:
        findings.append(
            Finding(
                "good",
                "het steps",
                f"{'forbidden' if forbidden else 'allowed'}, "
                f'cluster.shape = "{spec.cluster.shape}"',
            )
        )
    if spec.is_het and "backfill" not in settings.get("SchedulerType", ""):
        findings.append(
            Finding(
                "bad",
                "het jobs",
                f"SchedulerType = {settings.get('SchedulerType')}: only the backfill scheduler "
                f'starts heterogeneous jobs; set cluster.shape = "step" or "split"',
            )
        )
    return findings


def _requeue(spec: JobSpec, settings: dict[str, str]) -> list[Finding]:
    if settings.get("JobRequeue") == "0" and spec.cluster.requeue == "requeue":
        return [
            Finding(
                "note",
                "requeue",
                "off by default here (JobRequeue=0); the script asks for it with --requeue. Where that is "
                'refused: cluster.requeue = "chain"',
            )
        ]
    return [
        Finding(
            "good",
            "requeue",
            f"JobRequeue = {settings.get('JobRequeue')}, cluster.requeue = "
            f'"{spec.cluster.requeue}"; PreemptMode = {settings.get("PreemptMode")}, KillWait = '
            f"{settings.get('KillWait')}",
        )
    ]


def _partition(name: str, spec: JobSpec) -> list[Finding]:
    """One partition's limits against the request."""
    title = f"partition {name or '(default)'}"
    rows = [line.split("|") for line in _sinfo(SINFO, name)]
    if not rows:
        have = ", ".join(sorted(set(_sinfo("%R", ""))))
        return [Finding("bad", title, f"does not exist; there are {have}")]
    if not name:
        rows = _default_rows(rows)
    limit, nodes = rows[0][1], sum(int(row[2]) for row in rows)
    shown = f"limit {limit}, {nodes} nodes, {rows[0][3]} CPUs, {rows[0][5]}"
    asked = [component for component in spec.components if component.options.partition == name]
    problems = [*_time_problem(limit, spec.cluster), *_nodes_problem(nodes, asked)]
    for component in asked:
        problems += _node_problems(component, rows)
    return [Finding("good", title, shown), *(Finding("bad", title, text) for text in problems)]


def _sinfo(form: str, partition: str) -> list[str]:
    command = ["sinfo", "-h", "-o", form, *([f"--partition={partition}"] if partition else [])]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()


def _default_rows(rows: list[list[str]]) -> list[list[str]]:
    """The rows of the partition that %P marks with a star; all rows where none is."""
    default = [name.rstrip("*") for name in _sinfo("%P", "") if name.endswith("*")]
    return [row for row in rows if row[0] in default] or rows


def _time_problem(limit: str, cluster: ClusterConfig) -> list[str]:
    if limit in ("infinite", "UNLIMITED", "n/a") or seconds_of(cluster.time) <= seconds_of(limit):
        return []
    return [f"its limit is {limit}, cluster.time = {cluster.time} is longer"]


def _nodes_problem(nodes: int, asked: list[Component]) -> list[str]:
    wanted = sum(component.nodes for component in asked)
    return [f"has {nodes} nodes, the job asks for {wanted}"] if wanted > nodes else []


def _node_problems(component: Component, rows: list[list[str]]) -> list[str]:
    """What no single node of the partition can give this component."""
    where = f"cluster.components.{component.name}"
    options, found = component.options, []
    cpus, wanted = _greatest(rows, 3), component.tasks_per_node * options.cpus_per_task
    if cpus is not None and wanted > cpus:
        found.append(
            f"has at most {cpus} CPUs a node, {where} asks for {wanted} ({component.tasks_per_node} tasks of cpus_per_task "
            f"= {options.cpus_per_task}); lower it, or raise nodes"
        )
    gpus = max(_gpus(row[5]) for row in rows)
    if options.gpus_per_node > gpus:
        found.append(
            f"has {gpus or 'no'} GPUs a node in its GRES, {where}.gpus_per_node = {options.gpus_per_node}"
        )
    memory, mem = _greatest(rows, 4), _mib(options.mem)
    if memory is not None and mem > memory:
        found.append(f"has at most {memory} MiB a node, {where}.mem = {options.mem}")
    return found


def _greatest(rows: list[list[str]], column: int) -> int | None:
    """None where sinfo only says "this or more" (64+)."""
    texts = [row[column] for row in rows]
    return max(map(int, texts)) if all(text.isdigit() for text in texts) else None


def _gpus(gres: str) -> int:
    """`gpu:4`, `gpu:a100:4(S:0-1)`, several kinds with commas; 0 without any."""
    return sum(int(n) for n in re.findall(r"gpu:(?:[^:,()]+:)?(\d+)", gres))


def _mib(mem: str) -> float:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", mem.strip(), re.IGNORECASE)
    return int(match[1]) * MIB[match[2].upper()] if match else 0.0


def _test_only(spec: JobSpec) -> Finding:
    answer = subprocess.run(
        ["sbatch", "--test-only"], input=render(spec), text=True, capture_output=True, timeout=60
    )
    text = " ".join((answer.stderr or answer.stdout).split())
    return Finding("good" if answer.returncode == 0 else "bad", "sbatch --test-only", text)

"""The srun lines of a job, for every shape. Pure."""

from __future__ import annotations

import shlex

from vime_hpc.launch.allocation import gpus_words, plain_allocation
from vime_hpc.launch.job import Component, JobSpec

# Nodes, then cores within a node: rank i of a node gets the i-th block of its cores, beside the i-th GPU on most machines.
DISTRIBUTIONS = {"block": "block:block", "cyclic": "cyclic"}


def start_lines(spec: JobSpec) -> str:
    """The srun lines; leaves the process ids of the steps that are waited for in `steps`."""
    shape = spec.cluster.shape if len(spec.components) > 1 else "split"
    lines = [_service(spec, component) for component in spec.services]
    if shape == "split":
        lines += [
            "# Host of every rank, in rank order: one step, roles by rank.",
            "unset SLURM_NTASKS_PER_NODE",
            'export SLURM_HOSTFILE="$VIME_ATTEMPT/hosts"',
            f"{_srun(spec, None)} {_task(None, 0)} &",
            "steps=($!)",
        ]
    elif shape == "separate":
        lines.append("steps=()")
        for component in spec.ranked:
            lines += [
                f"{_srun(spec, component)} {_task(spec.ranked.index(component), component.first_rank)} &",
                "steps+=($!)",
            ]
    else:
        commands = [
            f"{_srun(spec, component, first=index == 0)} {_task(index, 0)}"
            for index, component in enumerate(spec.ranked)
        ]
        lines += [" : \\\n  ".join(commands) + " &", "steps=($!)"]
    return "\n".join(lines)


def _srun(spec: JobSpec, component: Component | None, *, first: bool = True) -> str:
    """srun and its options for one component, or for all of them in one step (component None)."""
    cluster = spec.cluster
    words = ["srun"] if first else []
    if component and spec.is_het:
        words.append(f"--het-group={spec.components.index(component)}")
    # --wait=0: no limit on how long the others may go on after a task ended well, whatever the site's default is.
    words += ["--kill-on-bad-exit=1", "--wait=0"]
    if component:
        words += [f"--nodes={component.nodes}", f"--ntasks={component.tasks}"]
        if component.tasks % component.nodes == 0:
            words.append(f"--ntasks-per-node={component.tasks_per_node}")
        if component.options.nodelist and not spec.is_het:
            words.append(f"--nodelist={shlex.quote(component.options.nodelist)}")
        words += [
            f"--cpus-per-task={component.options.cpus_per_task}",
            f"--distribution={DISTRIBUTIONS[component.distribution]}",
            f"--cpu-bind={shlex.quote(component.cpu_bind)}",
        ]
        words += [f"--{name}={value}" for name, value in gpus_words(component, spec).items()]
    else:
        binds = {c.cpu_bind for c in spec.ranked}
        largest = max(spec.components, key=lambda c: c.options.gpus_per_node)
        words += [
            f"--ntasks={spec.world_size}",
            f"--cpus-per-task={plain_allocation(spec)['cpus-per-task']}",
            "--distribution=arbitrary",
            f"--cpu-bind={shlex.quote(binds.pop()) if len(binds) == 1 else 'none'}",
        ]
        words += [f"--{name}={value}" for name, value in gpus_words(largest, spec).items()]
    words += [f"--mpi={cluster.mpi}"] if cluster.mpi else []
    return " ".join(words + [shlex.quote(option) for option in cluster.srun])


def _task(component: int | None, first_rank: int) -> str:
    which = f"VIME_COMPONENT={component} " if component is not None else ""
    return f'env {which}VIME_FIRST_RANK={first_rank} bash -c "$task" task "${{program[@]}}"'


def _service(spec: JobSpec, component: Component) -> str:
    """A step beside the ranks; it ends with the job."""
    if spec.is_het:
        where = f"--het-group={spec.components.index(component)}"
    else:
        before = sum(c.nodes for c in spec.components[: spec.components.index(component)])
        where = f"--relative={before}"
    inner = f"trap '' USR2; {component.options.command}"
    log = f'"$VIME_ATTEMPT/logs/{component.name}.log"'
    return (
        f"srun --overlap {where} --nodes={component.nodes} --ntasks={component.tasks} --ntasks-per-node=1 "
        f"--cpus-per-task={component.options.cpus_per_task} bash -c {shlex.quote(inner)} >>{log} 2>&1 &"
    )

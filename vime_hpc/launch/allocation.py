"""What sbatch is asked for: the #SBATCH lines of a job and the options of each component. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vime_hpc.launch.job import Component, JobSpec

# What Slurm resets at `#SBATCH hetjob`, so that a whole-job option of these has to be written again (manual,
# "Heterogeneous Job Support", and checked against 22.05).
PER_COMPONENT = frozenset(
    {
        "partition",
        "constraint",
        "mem",
        "mem_per_cpu",
        "mem_per_gpu",
        "exclusive",
        "gres",
        "hint",
        "threads_per_core",
        "cores_per_socket",
        "sockets_per_node",
        "ntasks_per_core",
        "cpus_per_gpu",
        "gpu_bind",
        "gpu_freq",
        "switches",
        "tmp",
        "oversubscribe",
        "licenses",
        "prefer",
    }
)


def directives(spec: JobSpec) -> list[str]:
    """All #SBATCH lines, components separated by `#SBATCH hetjob`."""
    whole = {
        _dashed(name): value
        for name, value in spec.cluster.slurm.items()
        if name.replace("-", "_") != "job_name"
    }
    repeated = {
        name: value for name, value in whole.items() if name.replace("-", "_") in PER_COMPONENT
    }
    lines = [
        directive("job-name", spec.job_name),
        directive("chdir", spec.directory),
        directive("time", spec.cluster.time),
        directive("signal", f"USR2@{spec.cluster.signal_delay_s}"),
        # The script opens its own log in the run directory; /dev/null needs no directory to exist before.
        directive("output", "/dev/null"),
        directive("open-mode", "append"),
        directive("no-requeue" if spec.cluster.requeue == "never" else "requeue", True),
    ]
    lines += [directive(name, value) for name, value in whole.items() if name not in repeated]
    lines += spec.cluster.directives
    if not spec.is_het:
        return [*lines, *_options(repeated | plain_allocation(spec))]
    for index, component in enumerate(spec.components):
        lines += ["#SBATCH hetjob"] if index else []
        lines += _options(repeated | _allocation(component, spec))
    return lines


def directive(name: str, value: Any) -> str:
    """One #SBATCH line. sbatch reads quotes and backslashes as a shell does; a bare flag has the value True."""
    if value is True:
        return f"#SBATCH --{name}"
    text = str(value)
    if re.fullmatch(r"[\w@%+=:,./\[\]^|&*()-]+", text):
        return f"#SBATCH --{name}={text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def _options(table: Mapping[str, Any]) -> list[str]:
    return [
        directive(_dashed(name), value)
        for name, value in table.items()
        if value not in (None, "", False)
    ]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _allocation(component: Component, spec: JobSpec) -> dict[str, Any]:
    """sbatch options of one component."""
    options = component.options
    return {
        "nodes": component.nodes,
        "ntasks": component.tasks,
        "ntasks-per-node": component.tasks_per_node,
        "cpus-per-task": options.cpus_per_task,
        **gpus_words(component, spec),
        "mem": options.mem,
        "partition": options.partition,
        "constraint": options.constraint,
        "nodelist": options.nodelist,
        **{_dashed(name): value for name, value in options.slurm.items()},
    }


def allocation_words(component: Component, spec: JobSpec) -> list[str]:
    """What srun or salloc is asked for to get one component without a batch script."""
    whole = {_dashed(name): value for name, value in spec.cluster.slurm.items()}
    asked = {**whole, "time": spec.cluster.time, **_allocation(component, spec)}
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in asked.items()
        if value not in (None, "", False)
    ]


def gpus_words(component: Component, spec: JobSpec) -> dict[str, Any]:
    """The option that asks for a component's GPUs, of sbatch and srun alike; empty without any."""
    gpus = component.options.gpus_per_node
    if not gpus:
        return {}
    if spec.cluster.gpu_request == "gres":
        return {"gres": f"gpu:{gpus}"}
    if spec.cluster.gpu_request == "gpus-per-task":
        return {"gpus-per-task": max(1, gpus // component.tasks_per_node)}
    return {"gpus-per-node": gpus}


def plain_allocation(spec: JobSpec) -> dict[str, Any]:
    """One allocation that holds every component: like nodes, each as large as the largest component wants."""
    components = spec.components
    tasks = max(component.tasks_per_node for component in components)
    cpus = max(
        component.tasks_per_node * component.options.cpus_per_task for component in components
    )
    largest = max(components, key=lambda component: component.options.gpus_per_node)
    nodelist = ",".join(c.options.nodelist for c in components if c.options.nodelist)
    extra: dict[str, Any] = {}
    for component in components:
        extra |= {_dashed(name): value for name, value in component.options.slurm.items()}
    first = components[0].options
    return {
        "nodes": sum(component.nodes for component in components),
        "ntasks-per-node": tasks,
        "cpus-per-task": -(-cpus // tasks),
        **gpus_words(largest, spec),
        "mem": first.mem,
        "partition": first.partition,
        "constraint": first.constraint,
        "nodelist": nodelist,
        **extra,
    }

"""JobSpec to the text of a batch script. Pure: the same description always gives the same text (golden files)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from typing import Any

from vime_hpc.launch.job import Component, JobSpec, describe

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

# Nodes, then cores within a node: rank i of a node gets the i-th block of its cores, beside the i-th GPU on most machines.
DISTRIBUTIONS = {"block": "block:block", "cyclic": "cyclic"}


def render(spec: JobSpec) -> str:
    """The whole batch script."""
    template = resources.files("vime_hpc.launch").joinpath("templates/job.sbatch").read_text()
    config = spec.config
    parts = {
        "DIRECTIVES": "\n".join(directives(spec)),
        "LAYOUT": "\n".join(f"# {line}" for line in describe(spec)),
        "UMASK": "027" if config.run.share_with_group else "077",
        "RUN": shlex.quote(str(spec.run)),
        "PYTHON": shlex.join(shlex.split(spec.python)),
        "EXPORTS": "\n".join(
            f"export {name}={shlex.quote(value)}" for name, value in exports(spec).items()
        ),
        "SETUP": "\n".join(config.cluster.setup),
        "CONFIG": toml_text(config.model_dump(mode="json", exclude_defaults=True)),
        "PROGRAM": shlex.join(spec.program),
        "START": start_lines(spec),
        "AGAIN": _again(spec),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], template)


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
        return [*lines, *_options(repeated | _plain_allocation(spec))]
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
        **_gpus(component, spec),
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


def _gpus(component: Component, spec: JobSpec) -> dict[str, Any]:
    gpus = component.options.gpus_per_node
    if not gpus:
        return {}
    if spec.cluster.gpu_request == "gres":
        return {"gres": f"gpu:{gpus}"}
    if spec.cluster.gpu_request == "gpus-per-task":
        return {"gpus-per-task": max(1, gpus // component.tasks_per_node)}
    return {"gpus-per-node": gpus}


def _plain_allocation(spec: JobSpec) -> dict[str, Any]:
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
        **_gpus(largest, spec),
        "mem": first.mem,
        "partition": first.partition,
        "constraint": first.constraint,
        "nodelist": nodelist,
        **extra,
    }


def exports(spec: JobSpec) -> dict[str, str]:
    """Environment of every task."""
    config = spec.config
    threads = {"trainer": config.trainer.num_threads, "engine": config.engine.num_threads}
    variables = {
        "VIME_LAYOUT": " ".join(
            f"{role}:{size}:{threads.get(role, 1)}"
            for component in spec.ranked
            for role, size in component.roles
        ),
        "VIME_COMPONENT_TASKS": ",".join(str(component.tasks) for component in spec.ranked),
        # A job submitted with --export=NONE hands that on to srun, whose tasks would then lack all of this.
        "SLURM_EXPORT_ENV": "ALL",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.cluster.socket_ifname:
        variables |= {
            "GLOO_SOCKET_IFNAME": config.cluster.socket_ifname,
            "NCCL_SOCKET_IFNAME": config.cluster.socket_ifname,
        }
    return variables


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
        words += [f"--{name}={value}" for name, value in _gpus(component, spec).items()]
    else:
        binds = {c.cpu_bind for c in spec.ranked}
        largest = max(spec.components, key=lambda c: c.options.gpus_per_node)
        words += [
            f"--ntasks={spec.world_size}",
            f"--cpus-per-task={_plain_allocation(spec)['cpus-per-task']}",
            "--distribution=arbitrary",
            f"--cpu-bind={shlex.quote(binds.pop()) if len(binds) == 1 else 'none'}",
        ]
        words += [f"--{name}={value}" for name, value in _gpus(largest, spec).items()]
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


def _again(spec: JobSpec) -> str:
    if spec.cluster.requeue == "never":
        return '  printf "to go on: sbatch %q\\n" "$VIME_ATTEMPT/job.sbatch"'
    lines = (
        [] if spec.cluster.requeue == "chain" else ['  scontrol requeue "$SLURM_JOB_ID" && exit 75']
    )
    return "\n".join(
        [
            *lines,
            "  # A new job after this one. This job's own variables must not reach it.",
            "  id=$SLURM_JOB_ID",
            '  for name in "${!SLURM_@}"; do [ "$name" = SLURM_CONF ] || unset "$name"; done',
            '  sbatch --dependency=afterany:"$id" "$VIME_ATTEMPT/job.sbatch" || verdict=1',
        ]
    )


def toml_text(tree: Mapping[str, Any], at: tuple[str, ...] = ()) -> str:
    """A plain tree as TOML, tables after values; what tomllib reads back is the tree (None is left out)."""
    lines = [
        f"{_key(name)} = {_toml_value(value)}"
        for name, value in tree.items()
        if not isinstance(value, Mapping) and value is not None
    ]
    blocks = ["\n".join(lines)] if lines else []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            inner = toml_text(value, (*at, name))
            own = any(not isinstance(v, Mapping) for v in value.values()) or not value
            header = f"[{'.'.join(_key(part) for part in (*at, name))}]\n" if own else ""
            blocks.append(header + inner)
    return "\n".join(blocks)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value)

"""JobSpec to the text of a batch script. Pure: the same description always gives the same text (golden files)."""

from __future__ import annotations

import re
import shlex
from importlib import resources

from vime_hpc.launch.allocation import directives
from vime_hpc.launch.job import JobSpec, describe
from vime_hpc.launch.steps import start_lines
from vime_hpc.launch.toml_text import toml_text


def render(spec: JobSpec) -> str:
    """The whole batch script."""
    template = resources.files("vime_hpc.launch").joinpath("templates/job.sbatch").read_text()
    config = spec.config
    parts = {
        "DIRECTIVES": "\n".join(directives(spec)),
        "LAYOUT": "\n".join(f"# {line}" for line in describe(spec)),
        "UMASK": "027" if config.run.share_with_group else "077",
        "RUN": shlex.quote(str(spec.run)),
        "PYTHON": shlex.join(spec.python),
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


def _again(spec: JobSpec) -> str:
    if spec.cluster.requeue == "never":
        return '  printf "to go on: sbatch %q\\n" "$VIME_ATTEMPT/job.sbatch"'
    requeue = [
        "  for _ in 1 2 3 4 5 6; do # the controller may be restarting",
        '    said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && exit 75',
        '    echo "scontrol requeue: $said"',
        '    case $said in *"Unable to contact"* | *"timed out"*) sleep 10 ;; *) break ;; esac',
        "  done",
    ]
    return "\n".join(
        [
            *([] if spec.cluster.requeue == "chain" else requeue),
            "  # A new job after this one. This job's own variables must not reach it.",
            "  id=$SLURM_JOB_ID",
            '  for name in "${!SLURM_@}"; do [ "$name" = SLURM_CONF ] || unset "$name"; done',
            '  sbatch --dependency=afterany:"$id" "$VIME_ATTEMPT/job.sbatch" || verdict=1',
        ]
    )

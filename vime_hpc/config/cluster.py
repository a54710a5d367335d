"""[cluster]: the machine. Addresses and interfaces of any job, and for `vime-hpc submit` what Slurm is asked for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from vime_hpc.config.section import Section

# What `--cluster.slurm.X` may be: sbatch's long options (Slurm 24.11), with underscores, without those this project
# writes itself (OWNED).
_OPTION_NAMES = """
account acctg_freq batch bb bbf begin clusters comment constraint container contiguous core_spec cores_per_socket
cpu_freq cpus_per_gpu deadline delay_boot dependency distribution exclude exclusive export export_file extra
extra_node_info get_user_env gpu_bind gpu_freq gpus gpus_per_socket gres gres_flags hint hold job_name
kill_on_invalid_dep licenses mail_type mail_user mcs_label mem mem_bind mem_per_cpu mem_per_gpu mincpus network nice
no_kill no_requeue nodefile nodelist ntasks_per_core ntasks_per_gpu ntasks_per_socket oom_kill_step oversubscribe
overcommit partition power prefer priority profile propagate qos reboot reservation resv_ports segment
sockets_per_node spread_job stepmgr switches thread_spec threads_per_core time_min tmp tres_bind
tres_per_task uid use_min_nodes wckey x11
"""
SBATCH_OPTIONS = frozenset(_OPTION_NAMES.split())
OWNED = {
    "nodes": "cluster.components.NAME.nodes",
    "time": "cluster.time",
    "signal": "cluster.signal_delay_s",
    "requeue": "cluster.requeue",
    "ntasks": "trainer.num_ranks, engine.num_engines, rollout.num_workers",
    "ntasks_per_node": "cluster.components.NAME.nodes",
    "gpus_per_node": "cluster.components.NAME.gpus_per_node",
    "gpus_per_task": "cluster.gpu_request",
    "cpus_per_task": "cluster.components.NAME.cpus_per_task",
    "output": "run.dir (logs lie in the run directory)",
    "error": "run.dir (logs lie in the run directory)",
    "open_mode": "nothing: logs are always appended to",
    "chdir": "the directory you submit from",
    "array": "nothing: a run is one job",
    "wait": "nothing",
    "parsable": "--json",
    "test_only": "--test-only",
}


def _check_options(options: dict[str, Any], where: str) -> dict[str, Any]:
    import difflib

    for name in options:
        plain = name.replace("-", "_")
        if plain in OWNED:
            raise ValueError(f"{where}.{name}: this is set through {OWNED[plain]}")
        if plain not in SBATCH_OPTIONS:
            near = difflib.get_close_matches(plain, SBATCH_OPTIONS, n=1)
            raise ValueError(
                f"{where}.{name} is no sbatch option"
                + (f"; did you mean {near[0]}?" if near else ".")
                + " One that your Slurm has and this list does not goes into cluster.directives as a whole line"
            )
    return options


class ComponentConfig(Section):
    """A set of like nodes of the job: one component of a heterogeneous job, or its share of a plain allocation."""

    roles: list[Literal["trainer", "engine", "rollout"]] = Field(default_factory=list)
    """Roles that run here; empty = by the component's name ("rollout" takes the engines too unless another does)."""
    command: str = ""
    """A service beside the ranks (reward server, sandbox): this shell command, once per node. Such a component has no roles."""
    nodes: PositiveInt = 1
    """Nodes of this component."""
    cpus_per_task: PositiveInt = 1
    """CPUs of one task (told to sbatch and to srun: Slurm 22.05 to 23.02 do not hand it on)."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs asked for on each node."""
    mem: str = ""
    """Memory per node, as "480G"; "0" = all of it; empty = the site's default."""
    partition: str = ""
    """Slurm partition."""
    constraint: str = ""
    """Node features, as "gpu&hbm80g"."""
    nodelist: str = ""
    """Particular hosts, as n[1-3]; empty = any."""
    cpu_bind: str = ""
    """srun --cpu-bind of its tasks; empty = "cores" where only trainer ranks run, else "none" (see docs/slurm.md)."""
    slurm: dict[str, Any] = Field(default_factory=dict)
    """Further sbatch options of this component."""

    @field_validator("slurm")
    @classmethod
    def _options(cls, options: dict[str, Any]) -> dict[str, Any]:
        return _check_options(options, "cluster.components.NAME.slurm")

    @model_validator(mode="after")
    def _service_or_ranks(self) -> ComponentConfig:
        if self.command and self.roles:
            raise ValueError(
                "a component has roles or a command, not both; make the service a component of its own"
            )
        return self


class ClusterConfig(Section):
    """The machine: addresses, interfaces, and (for submit) Slurm's options."""

    socket_ifname: str = ""
    """Network interface of rendezvous and gloo/NCCL sockets; empty = the one on the route to the first host."""
    shape: Literal["het", "step", "split", "separate"] = "het"
    """het: heterogeneous job, one srun over all components; separate: heterogeneous job, one srun per component
    (sites with disable_hetjob_steps); step: plain allocation, heterogeneous srun; split: plain allocation, one srun,
    roles by rank (also the shape for a single node)."""
    time: str = "01:00:00"
    """Time limit of one start of the job, as Slurm writes it (D-HH:MM:SS); the same for all components."""
    signal_delay_s: PositiveInt = 300
    """The warning comes so long before the limit. At least checkpoint time + one step + 60 s (Slurm is up to 60 s early)."""
    end_margin_s: PositiveInt = 45
    """A job that has not stopped by itself so long before the limit is ended and requeued: Slurm requeues none at the limit."""
    requeue: Literal["requeue", "chain", "never"] = "requeue"
    """requeue: the same job again; chain: a new job after this one, where requeue is not allowed; never: a person does it."""
    restart_on_crash: bool = True
    """Start again after a crash, too; configuration errors and damaged data always stop."""
    max_restarts_without_progress: NonNegativeInt = 3
    """Starts in a row that end by crash or time limit with no new step and no new checkpoint before the run stops."""
    max_restarts: NonNegativeInt | None = None
    """Restarts after crashes and time limits in all; preemption and node failure do not count. None = no limit."""
    gpu_request: Literal["gpus-per-node", "gres", "gpus-per-task"] = "gpus-per-node"
    """How GPUs are asked for; gpus-per-task hides GPUs of one node from each other, which breaks peer-to-peer copies."""
    python: str = ""
    """Command that runs Python on the nodes, with a container in front if need be; empty = the Python submit runs in."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines of the batch script before anything else: module load, source."""
    mpi: str = ""
    """srun --mpi=VALUE (pmi2, pmix): ranks learn the meeting point by an MPI broadcast; empty = by a file, without MPI."""
    srun: list[str] = Field(default_factory=list)
    """Further options of every srun, behind ours (srun takes the last), as "--environment=/path/env.toml"."""
    directives: list[str] = Field(default_factory=list)
    """Whole #SBATCH lines for what the tables below cannot say."""
    slurm: dict[str, Any] = Field(default_factory=dict)
    """sbatch options of the whole job (account, qos, reservation, ...)."""
    components: dict[str, ComponentConfig] = Field(default_factory=dict)
    """The job's components in rank order; empty = trainer and rollout on one node each."""

    @field_validator("slurm")
    @classmethod
    def _options(cls, options: dict[str, Any]) -> dict[str, Any]:
        return _check_options(options, "cluster.slurm")

    @field_validator("directives")
    @classmethod
    def _lines(cls, lines: list[str]) -> list[str]:
        for line in lines:
            if not line.startswith("#") or "\n" in line:
                raise ValueError(f"cluster.directives: {line!r} is not one line that starts with #")
        return lines


def unchanged(cluster: ClusterConfig) -> list[str]:
    """Options in which an example file's CHANGE was left standing."""
    options = {f"cluster.slurm.{name}": value for name, value in cluster.slurm.items()}
    for name, component in cluster.components.items():
        options[f"cluster.components.{name}.partition"] = component.partition
    return [name for name, value in options.items() if isinstance(value, str) and "CHANGE" in value]

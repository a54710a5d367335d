"""What is asked of Slurm, from the run's configuration: components, their ranks, nodes and options. Pure.

One description serves four shapes: a heterogeneous job with one spanning step (het), with a step per component
(separate), a plain allocation with a heterogeneous step (step), and one with a single step split by rank (split).
"""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from vime_hpc.cluster.rank import Role, layout
from vime_hpc.config.cluster import ClusterConfig, ComponentConfig
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Component:
    """Ranks on a set of like nodes.

    Attributes:
        roles: (role, count) in rank order; empty for a service.
        first_rank: global rank of its first task.
        tasks: its ranks, or one per node for a service.
    """

    name: str
    roles: tuple[tuple[Role, int], ...]
    first_rank: int
    tasks: int
    options: ComponentConfig

    @property
    def nodes(self) -> int:
        return self.options.nodes

    @property
    def tasks_per_node(self) -> int:
        """Most tasks any of its nodes holds."""
        return math.ceil(self.tasks / self.nodes)

    @property
    def is_service(self) -> bool:
        return not self.roles

    @property
    def distribution(self) -> str:
        """Trainer ranks fill a node before the next (tensor parallel neighbours); engines and workers are dealt round."""
        return "block" if all(role is Role.TRAINER for role, _ in self.roles) else "cyclic"

    @property
    def cpu_bind(self) -> str:
        """For srun: trainer ranks keep to their own cores. Engines (which start processes of their own) and rollout workers
        differ in what they need and have one --cpus-per-task, so they share all that their node's tasks were given."""
        return self.options.cpu_bind or ("cores" if self.distribution == "block" else "none")

    def ranks_of_nodes(self) -> list[list[int]]:
        """Global ranks on each node of this component."""
        if self.distribution == "cyclic":
            return [
                [self.first_rank + task for task in range(node, self.tasks, self.nodes)]
                for node in range(self.nodes)
            ]
        per_node = self.tasks_per_node
        return [
            [
                self.first_rank + task
                for task in range(node * per_node, min((node + 1) * per_node, self.tasks))
            ]
            for node in range(self.nodes)
        ]


RANK_PROGRAM = ("-P", "-m", "vime_hpc.roles")
"""What a rank runs, after the Python command and before the run directory."""


@dataclass(frozen=True)
class JobSpec:
    """One job, before it is written as a script."""

    config: RunConfig
    run: Path
    directory: Path
    job_name: str
    components: tuple[Component, ...]
    program: tuple[str, ...] = RANK_PROGRAM

    @property
    def cluster(self) -> ClusterConfig:
        return self.config.cluster

    @property
    def ranked(self) -> tuple[Component, ...]:
        """The components whose tasks are ranks of the job."""
        return tuple(component for component in self.components if not component.is_service)

    @property
    def services(self) -> tuple[Component, ...]:
        return tuple(component for component in self.components if component.is_service)

    @property
    def world_size(self) -> int:
        return sum(component.tasks for component in self.ranked)

    @property
    def is_het(self) -> bool:
        return self.cluster.shape in ("het", "separate") and len(self.components) > 1

    @property
    def python(self) -> tuple[str, ...]:
        """The words that run Python on the nodes."""
        return tuple(shlex.split(self.cluster.python)) or (sys.executable,)


def job_spec(
    config: RunConfig, *, directory: Path | None = None, program: tuple[str, ...] = RANK_PROGRAM
) -> JobSpec:
    """The job a configuration asks for.

    Args:
        directory: where it is submitted from (relative paths of the configuration start here).
        program: what a rank runs in place of RANK_PROGRAM: a probe, a measurement, a test's stub.
    Raises:
        ConfigError: roles without a component or in two, ranks that do not fit their nodes or GPUs, components that a
            plain allocation cannot hold.
    """
    directory = directory or Path.cwd()
    run = (directory / config.run.dir).absolute()
    components = _components(config)
    spec = JobSpec(
        config,
        run,
        directory,
        str(config.cluster.slurm.get("job_name", f"vime-{run.name}")),
        components,
        program,
    )
    for component in spec.ranked:
        _check_fit(component, config)
    if not spec.is_het and config.cluster.shape in ("het", "separate") and len(components) == 1:
        return spec  # a single component is a plain job in any shape
    if config.cluster.shape in ("step", "split"):
        _check_plain(spec)
    _check_mpi(spec)
    _check_time(config.cluster)
    return spec


def _components(config: RunConfig) -> tuple[Component, ...]:
    wanted = dict(layout(config))
    tables = config.cluster.components or {
        name: ComponentConfig()
        for name in ("trainer", "rollout")
        if name == "trainer" or set(wanted) - {Role.TRAINER}
    }
    owners = _owners(tables, wanted)
    order = [role for role, _ in layout(config)]
    found: list[Component] = []
    first = 0
    for name, table in tables.items():
        if table.command:
            found.append(Component(name, (), 0, table.nodes, table))
            continue
        roles = tuple((role, wanted[role]) for role in order if owners[role] == name)
        if not roles:
            continue  # train_only has no rollout component, rollout_only no trainer
        tasks = sum(size for _, size in roles)
        found.append(Component(name, roles, first, tasks, table))
        first += tasks
    ranked = [role for component in found for role, _ in component.roles]
    if ranked != order:
        raise ConfigError(
            f"cluster.components stand in the order {', '.join(tables)}, which gives the roles {ranked}; ranks "
            f"run {', '.join(order)}, so the components have to stand in that order"
        )
    return tuple(found)


def _owners(tables: dict[str, ComponentConfig], wanted: dict[Role, int]) -> dict[Role, str]:
    """Which component each role runs in."""
    owners: dict[Role, str] = {}
    for name, table in tables.items():
        for role in map(Role, table.roles):
            if role in owners:
                raise ConfigError(
                    f"role {role} stands in two components, {owners[role]} and {name}; take it out of the `roles` of one"
                )
            owners[role] = name
    for role in wanted:
        if role not in owners:
            by_name = [str(role), "rollout"] if role is Role.ENGINE else [str(role)]
            name_ = next(
                (
                    n
                    for n in by_name
                    if n in tables and not tables[n].roles and not tables[n].command
                ),
                None,
            )
            if name_ is None:
                raise ConfigError(
                    f"no component runs the role {role}; add [cluster.components.{role}] or name the role in "
                    f"one's `roles` (there are: {', '.join(tables)})"
                )
            owners[role] = name_
    return owners


def _check_fit(component: Component, config: RunConfig) -> None:
    where = f"cluster.components.{component.name}"
    if component.nodes > component.tasks:
        raise ConfigError(
            f"{where}.nodes = {component.nodes}, but only {component.tasks} tasks run there; a node would be "
            f"idle. Set nodes = {component.tasks} or less, or more of {_counts(component)}"
        )
    if component.distribution == "block" and component.tasks % component.nodes:
        raise ConfigError(
            f"trainer.num_ranks = {component.tasks} does not divide over {where}.nodes = {component.nodes}; every node "
            f"holds equally many trainer ranks, so set one a multiple of the other"
        )
    gpus = component.options.gpus_per_node
    for role, size in component.roles:
        each = {Role.TRAINER: 1, Role.ENGINE: config.engine.tp, Role.ROLLOUT: 0}[role]
        device = config.trainer.device if role is Role.TRAINER else config.engine.device
        needed = math.ceil(size / component.nodes) * each
        if needed > gpus and (gpus or device == "cuda") and role is not Role.ROLLOUT:
            raise ConfigError(
                f"{where}.gpus_per_node = {gpus}, but {math.ceil(size / component.nodes)} {role} on a node need "
                f"{needed}; raise nodes or gpus_per_node"
                + (", or set engine.tp lower" if role is Role.ENGINE else "")
            )


def _counts(component: Component) -> str:
    """The options that say how many tasks a component has."""
    names = {
        Role.TRAINER: "trainer.num_ranks",
        Role.ENGINE: "engine.num_engines",
        Role.ROLLOUT: "rollout.num_workers",
    }
    return ", ".join(names[role] for role, _ in component.roles)


def _check_plain(spec: JobSpec) -> None:
    shape = spec.cluster.shape
    if spec.services and shape == "split":
        raise ConfigError(
            f'cluster.shape = "split" has a single step, which cannot hold the service '
            f'{spec.services[0].name}; use "step", "het" or "separate"'
        )
    for option in ("partition", "constraint", "mem", *(["cpu_bind"] if shape == "split" else [])):
        values = {getattr(component.options, option) for component in spec.components}
        if len(values) > 1:
            raise ConfigError(
                f'cluster.shape = "{shape}" is one plain allocation{" with one step" * (shape == "split")}, but its '
                f"components differ in {option} "
                f'({", ".join(sorted(repr(v) for v in values))}); use "het" or "separate"'
            )


def _check_mpi(spec: JobSpec) -> None:
    if spec.cluster.mpi and spec.cluster.shape == "separate" and len(spec.components) > 1:
        raise ConfigError(
            f'cluster.mpi = "{spec.cluster.mpi}" needs all ranks in one step, but cluster.shape = "separate" starts '
            f"one per component; use another shape, or leave cluster.mpi empty and meet through a file"
        )


def _check_time(cluster: ClusterConfig) -> None:
    limit = seconds_of(cluster.time)
    if limit <= cluster.signal_delay_s + cluster.end_margin_s:
        raise ConfigError(
            f"cluster.time = {cluster.time} ({limit} s) is not longer than cluster.signal_delay_s = "
            f"{cluster.signal_delay_s} + end_margin_s = {cluster.end_margin_s}: the job would be told to stop "
            f"at once. Raise cluster.time, or lower the others"
        )


def seconds_of(time: str) -> int:
    """Slurm's time formats (M, M:S, H:M:S, D-H, D-H:M, D-H:M:S) in seconds."""
    days, dash, rest = time.rpartition("-")
    try:
        numbers = [int(part) for part in rest.split(":")]
        if len(numbers) > 3 or (dash and not days):
            raise ValueError
        if dash:
            hours, minutes, seconds = [*numbers, 0, 0][:3]
        elif len(numbers) == 3:
            hours, minutes, seconds = numbers
        else:
            hours, minutes, seconds = 0, *[*numbers, 0][:2]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    except ValueError:
        raise ConfigError(
            f"cluster.time = {time!r} is no Slurm time; write D-HH:MM:SS, HH:MM:SS or minutes"
        ) from None


def describe(spec: JobSpec) -> list[str]:
    """The layout and what happens when the job is stopped, one line each."""
    lines = []
    for index, component in enumerate(spec.components):
        if component.is_service:
            what = f"service `{component.options.command}`, one per node"
        else:
            last = component.first_rank + component.tasks - 1
            roles = " + ".join(f"{size} {role}" for role, size in component.roles)
            what = f"ranks {component.first_rank}..{last}: {roles}, up to {component.tasks_per_node} a node"
        gpus = (
            f", {component.options.gpus_per_node} GPUs a node"
            if component.options.gpus_per_node
            else ""
        )
        lines.append(
            f"component {index} {component.name}: {component.nodes} node{'s'[: component.nodes > 1]}, {what}{gpus}"
        )
    return [*lines, *_comes_back(spec.cluster)]


def _comes_back(cluster: ClusterConfig) -> list[str]:
    if cluster.requeue == "never":
        return [
            'requeue on preemption: no, on time-out: no, on a crash: no (cluster.requeue = "never")'
        ]
    how = "by requeue" if cluster.requeue == "requeue" else "by a new job after this one"
    in_all = "" if cluster.max_restarts is None else f", at most {cluster.max_restarts} in all"
    return [
        f"requeue on preemption: yes, on time-out: yes, on a crash: {'yes' if cluster.restart_on_crash else 'no'} ({how}); "
        f"at most {cluster.max_restarts_without_progress} in a row without progress{in_all} (preemption does not count)",
        f"warning (USR2) {cluster.signal_delay_s} s before the limit of {cluster.time}; ended by force "
        f"{cluster.end_margin_s} s before it",
    ]

"""submitit executor for heterogeneous jobs, which submitit 1.5.4 does not know (facebookincubator/submitit#1741).

`HetSlurmExecutor` submits a JobSpec: submitit writes the script, calls sbatch and hands back a Job; script text, task
count and the job's state are ours. A plugin by entry points, so `AutoExecutor(folder, cluster="hetslurm")` finds it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob, SlurmJobEnvironment

from vime_hpc.cluster.slurm import component_hosts
from vime_hpc.cluster.slurm_says import has_accounting, read_states
from vime_hpc.errors import ConfigError, VimeError
from vime_hpc.launch.job import JobSpec
from vime_hpc.launch.sbatch import render


class HetSlurmWatcher(SlurmInfoWatcher):  # type: ignore[misc]  # submitit is not followed by mypy
    """States by sacct, or by squeue where a site has no accounting; `J+1` counts for J."""

    def _make_command(self) -> list[str] | None:
        jobs = sorted({job.split("_")[0] for job in self._registered - self._finished})
        if not jobs:
            return None
        if has_accounting():
            return [
                "sacct",
                "-X",
                "-n",
                "-P",
                "-o",
                "JobID,State,NodeList",
                *(f"--jobs={job}" for job in jobs),
            ]
        return ["squeue", "-h", "-t", "all", "-o", "%i|%T|%N", f"--jobs={','.join(jobs)}"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Lines `id|state|nodes` to a table per leader job."""
        text = string.decode() if isinstance(string, bytes) else string
        return {
            job: {"JobID": job, "State": state.state, "NodeList": state.nodes}
            for job, state in read_states(text).items()
        }


class HetSlurmJob(SlurmJob[Any]):  # type: ignore[misc]  # submitit is not followed by mypy
    """A submitted job. Its tasks leave no pickles; what it came to stands in the run directory."""

    watcher = HetSlurmWatcher(delay_s=30)


class HetSlurmJobEnvironment(SlurmJobEnvironment):  # type: ignore[misc]  # submitit is not followed by mypy
    """submitit's view from inside a task, with the hosts in component order (Slurm sorts them)."""

    @property
    def hostnames(self) -> list[str]:
        return [host for group in component_hosts(os.environ) for host in group] or [self.hostname]


class HetSlurmExecutor(SlurmExecutor):  # type: ignore[misc]  # submitit is not followed by mypy
    """Submits job descriptions through submitit. `folder` holds the scripts as they were submitted."""

    job_class = HetSlurmJob

    def __init__(self, folder: str | Path, max_num_timeout: int = 3, **kwargs: Any) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, **kwargs)
        self._spec: JobSpec | None = None

    def submit_spec(self, spec: JobSpec) -> core.Job[Any]:
        """Submit a job.

        Raises:
            VimeError: sbatch refused it; its words are in the message.
        """
        self._spec = spec
        utils.JobPaths.get_first_id_independent_folder(self.folder).mkdir(
            parents=True, exist_ok=True
        )
        try:
            return self._submit_command("")
        except utils.FailedJobError as error:
            raise VimeError(
                f"sbatch refused the job: {_last_words(error)}. The script is what `vime-hpc submit --dry-run` "
                f"prints; `vime-hpc doctor --cluster` compares the request with the partitions"
            ) from error

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        raise ConfigError(
            "HetSlurmExecutor submits job descriptions (submit_spec), not Python functions or arrays; for those "
            'use submitit\'s own executor, cluster="slurm"'
        )

    def _num_tasks(self) -> int:
        assert self._spec is not None
        return self._spec.world_size

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        assert self._spec is not None
        return render(self._spec)


def _last_words(error: Exception) -> str:
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if "error" in line.lower() or "sbatch" in line.lower()
    ]
    return "; ".join(lines[-3:]) or str(error)

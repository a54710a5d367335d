"""The run directory that a command is asked about: by its path, or by the id of its Slurm job."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from vime_hpc.errors import ConfigError


def find_run(target: str) -> Path:
    """The run directory of a path or of a job's id (asked from the script that Slurm keeps).

    Raises:
        ConfigError: there is no such run, or Slurm does not know the job any more.
    """
    path = Path(target)
    if path.is_dir():
        if not (path / "config.json").exists() and not (path / "submitted").exists():
            raise ConfigError(
                f"{path} is not a run directory of vime-hpc (neither config.json nor submitted/ in it); give the "
                f"run.dir of the run, or its job's id"
            )
        return path
    if not re.fullmatch(r"\d+(\+\d+)?", target):
        raise ConfigError(
            f"{target} is neither a directory nor a job id; give the run.dir of a run, or the id that submit printed "
            f"(squeue --me lists yours)"
        )
    match = re.search(r"^run=(.+)$", _script_of(target.partition("+")[0]), re.MULTILINE)
    if not match:
        raise ConfigError(
            f"Slurm does not have the script of job {target} (any more), or it is none of ours; give the run "
            f"directory instead"
        )
    return Path(shlex.split(match[1])[0])


def _script_of(job_id: str) -> str:
    """The batch script, from Slurm while it remembers the job, else from the file that accounting says was submitted."""
    if not shutil.which("scontrol") and not shutil.which("sacct"):
        raise ConfigError(
            f"job {job_id}: there is neither scontrol nor sacct here; give the run directory instead"
        )
    script = _said("scontrol", "write", "batch_script", job_id, "-")
    if script:
        return script
    line = _said("sacct", "-X", "-n", "-P", "-o", "SubmitLine", f"--jobs={job_id}")
    _, _, rest = line.partition("\n")[0].partition(" ")
    for word in (rest, *rest.split()):  # Slurm does not quote a path with spaces
        # submitit renames what it has submitted
        for path in (Path(word), Path(word).parent / f"{job_id}_submission.sh"):
            if path.is_file():
                return path.read_text(errors="replace")
    return ""


def _said(*words: str) -> str:
    """What one of Slurm's commands prints; empty where it is not there or refuses."""
    if not shutil.which(words[0]):
        return ""
    answer = subprocess.run(words, capture_output=True, text=True, timeout=30)
    return answer.stdout if answer.returncode == 0 else ""

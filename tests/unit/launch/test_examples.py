"""configs/clusters, sbatch and sbatch/sites say the same thing, and what submit would print.

VIME_WRITE_GOLDEN=1 pytest tests/unit/launch/test_examples.py writes sbatch/ anew from the configurations.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from vime_hpc.config.load import load_config
from vime_hpc.launch.allocation import directives
from vime_hpc.launch.job import JobSpec, describe, job_spec
from vime_hpc.launch.sbatch import render

ROOT = Path(__file__).parents[3]
CLUSTERS = sorted((ROOT / "configs" / "clusters").glob("*.toml"))
SITES = [path for path in CLUSTERS if path.stem not in ("local_test", "one_node")]
RUN = [
    "--model.path=/path/to/model",
    "--data.train=/path/to/prompts.jsonl",
    "--run.dir=/path/to/run",
    "--cluster.python=python",
]
EXAMPLES = {
    "het_job": ("generic", ["--trainer.num_ranks=4", "--engine.num_engines=4"]),
    "one_node": ("one_node", ["--trainer.num_ranks=4", "--engine.num_engines=4"]),
    "engines_only": ("generic", ["--run.mode=rollout_only", "--engine.num_engines=4"]),
}


def spec_of(cluster: str, overrides: list[str]) -> JobSpec:
    return job_spec(
        load_config([ROOT / "configs" / "clusters" / f"{cluster}.toml"], [*RUN, *overrides]),
        directory=Path("/path/to/vime_hpc"),
    )


def same(path: Path, text: str) -> None:
    if os.environ.get("VIME_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_plain_script_is_what_submit_prints(name: str) -> None:
    path = ROOT / "sbatch" / f"{name}.sbatch"
    same(path, render(spec_of(*EXAMPLES[name])))
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("cluster", [path.stem for path in SITES])
def test_the_site_header_has_the_cluster_file_s_comments_and_directives(cluster: str) -> None:
    spec = spec_of(cluster, ["--trainer.num_ranks=4", "--engine.num_engines=4"])
    source = (ROOT / "configs" / "clusters" / f"{cluster}.toml").read_text()
    comments = "".join(line + "\n" for line in source.splitlines() if line.startswith("# "))
    text = (
        "#!/bin/bash\n"
        + "\n".join(directives(spec))
        + "\n\n"
        + comments
        + f"# From configs/clusters/{cluster}.toml. "
        "The body below such a header is that of ../het_job.sbatch;\n# `vime-hpc submit CONFIG --dry-run --cluster "
        f"{cluster}` prints both.\n" + "".join(f"# {line}\n" for line in describe(spec))
    )
    same(ROOT / "sbatch" / "sites" / f"{cluster}.sbatch", text)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_cluster_file_holds_a_full_node_of_engines_and_a_worker(path: Path) -> None:
    gpus = {"one_node": 4, "lumi_like": 8, "local_test": 1}.get(path.stem, 4)
    spec = spec_of(path.stem, [f"--trainer.num_ranks={gpus}", f"--engine.num_engines={gpus}"])
    cores = {
        "perlmutter": 128,
        "juwels_booster": 96,
        "jupiter": 288,
        "leonardo": 32,
        "marenostrum5": 80,
        "alps": 288,
        "lumi_like": 56,
        "generic": 64,
        "one_node": 64,
        "local_test": 16,
    }[path.stem]
    for component in spec.components:
        assert component.tasks_per_node * component.options.cpus_per_task <= cores

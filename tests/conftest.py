"""Options of the whole test suite."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

LIGHT = (
    "unit/test_config.py",
    "unit/test_loop.py",
    "unit/test_plugin.py",
    "unit/test_run_directory.py",
    "unit/buffer/test_buffer_format_page.py",
    "unit/buffer/test_buffer_golden.py",
    "unit/buffer/test_buffer_samples.py",
    "unit/buffer/test_buffer_segment_file.py",
    "unit/buffer/test_buffer_steps.py",
    "unit/launch/test_requeue.py",
    "unit/launch/test_sbatch.py",
    "unit/launch/test_slurm_environment.py",
    "unit/trainer/test_trainer_layout.py",
    "unit/trainer/test_trainer_packing.py",
    "unit/weights/test_plan.py",
    "unit/weights/test_delta.py",
    "unit/weights/test_weights_command.py",
)
"""One or more files of every layer that must work where torch is not installed (tools/test_without_torch.sh)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--light", action="store_true", help="only the files that must run without torch"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--light") or not collection_path.name.startswith("test_"):
        return None
    here = collection_path.relative_to(Path(__file__).parent).as_posix()
    return None if here in LIGHT else True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CI=true a test that leaves itself out has failed: what it needs is missing."""
    report = yield
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"CI=true allows no test to be left out: {report.longrepr}"
    return report

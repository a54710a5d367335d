"""A real vLLM on the CPU with a tiny model, started once per module."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from real_engine import RealEngine, start_engine  # isort: skip


def need_vllm() -> None:
    """Skip without vLLM and the router; with CI set a missing part is a failure."""
    if not os.environ.get("CI"):
        pytest.importorskip("vllm.version")


@pytest.fixture(scope="module")
def dense_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    need_vllm()
    engine = start_engine(tmp_path_factory.mktemp("dense"), moe=False, tp=1)
    yield engine
    _stop(engine)


@pytest.fixture(scope="module")
def moe_tp2_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    need_vllm()
    engine = start_engine(tmp_path_factory.mktemp("moe"), moe=True, tp=2)
    yield engine
    _stop(engine)


def _stop(engine: RealEngine) -> None:
    if engine.owner.poll() is None:
        os.killpg(engine.owner.pid, signal.SIGKILL)
    engine.owner.wait()

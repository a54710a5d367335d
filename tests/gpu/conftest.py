"""Tests on one NVIDIA GPU: `pytest -m gpu tests/gpu`. Where there is none they are skipped, saying so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
for neighbour in ("distributed/trainer", "engine"):  # trainer_cases, real_engine
    sys.path.insert(0, str(HERE.parent / neighbour))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="torch finds no CUDA device here")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)

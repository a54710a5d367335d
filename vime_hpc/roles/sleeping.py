"""Trainer and engines on the same GPUs take turns with the memory: the engines sleep while a step is trained."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vime_hpc.protocols import Generator, Metrics
from vime_hpc.roles.receiving import LeadingReceiver
from vime_hpc.types import PromptGroup


class SleepAfterGenerating:
    """protocols.Generator that puts the engines to sleep once a step is generated.

    Before the step is committed, that is, before the trainer starts on it: vLLM checks that the free memory of the device
    grows while it goes to sleep. The next version wakes the engines (engine/update.py).

    Args:
        generator: makes the step. engines: of rollout worker 0, the only one (checked by the configuration).
        level: engine.sleep_level.
    """

    def __init__(self, generator: Generator, engines: LeadingReceiver, level: int) -> None:
        self._generator, self._engines, self._level = generator, engines, level

    def generate(self, step: int, version: int) -> tuple[list[PromptGroup], Metrics]:
        """A whole step's groups, and perf/engine_sleep_time (seconds until the memory was free) among the statistics."""
        groups, stats = self._generator.generate(step, version)
        start = time.perf_counter()
        self._engines.sleep(self._level)
        return groups, {**stats, "perf/engine_sleep_time": time.perf_counter() - start}

    def state(self) -> Mapping[str, Any]:
        return self._generator.state()

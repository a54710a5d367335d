"""`vime-hpc bench …`: runs a benchmark and prints its figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def rollout(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc bench rollout`."""
    from vime_hpc.config.model import ModelConfig
    from vime_hpc.engine.bench import bench_rollout

    size = arguments.prompt_tokens
    prompts = [[(7 * i + 13 * j) % 250 for j in range(size)] for i in range(arguments.num_prompts)]
    model = ModelConfig(path=arguments.model, dtype=arguments.dtype)
    return _print(
        bench_rollout(model, prompts, max_tokens=arguments.max_tokens, repeats=arguments.repeats),
        arguments,
    )


def buffer(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc bench buffer`."""
    from vime_hpc.buffer.bench import bench_buffer

    return _print(
        bench_buffer(
            Path(arguments.work), megabytes=arguments.megabytes, repeats=arguments.repeats
        ),
        arguments,
    )


def weights(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc bench weights`."""
    from vime_hpc.engine.bench_weights import bench_control_calls, bench_engine
    from vime_hpc.weights.bench import bench_weights

    work = Path(arguments.work)
    figures = bench_weights(work, megabytes=arguments.megabytes, repeats=arguments.repeats)
    figures |= bench_control_calls()
    if arguments.engine:
        figures |= bench_engine(Path(arguments.engine), arguments.dtype, work, tp=arguments.tp)
    return _print(figures, arguments)


def _print(figures: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps(figures))
    else:
        spread = {f"{name}_{end}" for name in figures for end in ("min", "max")}
        for name, value in figures.items():
            if name not in spread:
                print(f"{name:50} {_shown(value)}{_spread(figures, name)}")
    return 0


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _spread(figures: Mapping[str, Any], name: str) -> str:
    """The smallest and the largest of the rounds behind a median, where a benchmark gives them."""
    if f"{name}_min" not in figures:
        return ""
    return f"  ({_shown(figures[f'{name}_min'])} to {_shown(figures[f'{name}_max'])})"

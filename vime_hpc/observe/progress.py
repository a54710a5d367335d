"""What the launcher shows while a run goes on: a bar and a table on a terminal, one line a step otherwise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

COLUMNS = (
    ("reward", "rollout/raw_reward", "{:.3f}"),
    ("loss", "train/loss", "{:+.4f}"),
    ("kl", "train/ppo_kl", "{:.1e}"),
    ("grad", "train/grad_norm", "{:.3f}"),
    ("engine diff", "train/train_rollout_logprob_abs_diff", "{:.1e}"),
    ("length", "rollout/response_lengths_mean", "{:.1f}"),
    ("seconds", "perf/step_time", "{:.2f}"),
)

PARTS = (
    ("waiting", "perf/train_wait_time"),
    ("training", "perf/train_time"),
    ("weights", "perf/update_weights_time"),
    ("checkpoint before it", "perf/save_time"),
)
"""Where a step's seconds went. The last is that of the checkpoint before the step, and not in their sum."""


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """What the trainer's log says of a step. What the step has no number of is left out."""
    parts = [f"step {step + 1}/{num_steps}"]
    if "perf/update_weights_time" in metrics:
        parts.append(f"version {step + 1}")
    for title, key, pattern in (
        COLUMNS[0],
        COLUMNS[1],
        ("grad norm", "train/grad_norm", "{:.3f}"),
        ("tokens/s a rank", "perf/train_tokens_per_rank_per_sec", "{:.0f}"),
        ("seconds", "perf/step_time", "{:.2f}"),
    ):
        if key in metrics:
            parts.append(f"{title} {pattern.format(metrics[key])}")
    seconds = ", ".join(f"{title} {metrics[key]:.2f}" for title, key in PARTS if key in metrics)
    return "  ".join(parts) + (f" ({seconds})" if seconds else "")


class Progress(Protocol):
    def step(self, record: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def make_progress(mode: str, num_steps: int) -> Progress:
    """mode: auto (bar on a terminal, else lines), bar, lines, off."""
    if mode == "auto":
        mode = "bar" if sys.stdout.isatty() else "lines"
    return {"bar": BarProgress, "lines": LineProgress, "off": NoProgress}[mode](num_steps)


class NoProgress:
    """Says nothing."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def step(self, record: Mapping[str, Any]) -> None:
        del record

    def note(self, text: str) -> None:
        del text

    def close(self) -> None:
        return


class LineProgress(NoProgress):
    """One line a step: what a job log wants."""

    def step(self, record: Mapping[str, Any]) -> None:
        parts = [
            f"{title} {pattern.format(record[key])}"
            for title, key, pattern in COLUMNS
            if isinstance(record.get(key), (int, float))
        ]
        print(f"step {record['step'] + 1}/{self.num_steps}  " + "  ".join(parts), flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


class BarProgress(NoProgress):
    """A rich progress bar with the last step's numbers beside it, and a table of the last steps at the end."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps)
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = Console()
        self._bar = Progress(
            TextColumn("steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
        )
        self._task = self._bar.add_task("steps", total=num_steps, numbers="starting")
        self._records: list[Mapping[str, Any]] = []
        self._bar.start()

    def step(self, record: Mapping[str, Any]) -> None:
        self._records.append(record)
        numbers = "  ".join(
            f"{title} {pattern.format(record[key])}"
            for title, key, pattern in COLUMNS[:4]
            if isinstance(record.get(key), (int, float))
        )
        self._bar.update(self._task, completed=record["step"] + 1, numbers=numbers)

    def note(self, text: str) -> None:
        self._bar.console.print(text, highlight=False)

    def close(self) -> None:
        from rich.table import Table

        self._bar.stop()
        if not self._records:
            return
        table = Table("step", *(title for title, _, _ in COLUMNS))
        for record in self._records[-10:]:
            cells = [
                pattern.format(record[key]) if isinstance(record.get(key), (int, float)) else "-"
                for _, key, pattern in COLUMNS
            ]
            table.add_row(str(record["step"] + 1), *cells)
        self._console.print(table)

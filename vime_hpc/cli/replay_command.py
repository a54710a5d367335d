"""What `vime-hpc replay` does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vime_hpc.cli.preflight import check, keep_foreign_modules_out
from vime_hpc.launch.finished_buffer import refuse_unfinished
from vime_hpc.launch.local import run_local
from vime_hpc.launch.replay import Compared, Replay, compare, plan_replay, prepare


def replay(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc replay`; returns the exit code."""
    plan = plan_replay(arguments.run, arguments.steps, arguments.overrides, arguments.out)
    config = plan.config
    keep_foreign_modules_out()
    check(config, import_plugins=True)
    refuse_unfinished(config, plan.out, plan.first)
    prepare(plan)
    if arguments.json:
        quiet = config.observe.model_copy(update={"progress": "off"})
        config = config.model_copy(update={"observe": quiet})
    run_local(config)
    rows = compare(plan)
    if arguments.json:
        print(json.dumps({**summary(plan, rows), "metrics": [asdict(row) for row in rows]}))
    else:
        print(words(plan, rows))
    return 0


def summary(plan: Replay, rows: Sequence[Compared]) -> dict[str, Any]:
    """What the comparison comes to. `equal` is None where the source run recorded none of these steps."""
    known = [row for row in rows if row.equal is not None]
    return {
        "run": str(plan.source.root),
        "out": str(plan.out),
        "steps": [plan.first, plan.last],
        "changed": list(plan.changed),
        "equal": all(row.equal for row in known) if known else None,
        "num_compared": len(known),
        "num_different": sum(not row.equal for row in known),
    }


def words(plan: Replay, rows: Sequence[Compared]) -> str:
    """The table, and one line that says what it comes to."""
    width = max((len(row.metric) for row in rows), default=6)
    lines = [f"{'step':>6}  {'metric':<{width}}  {'recorded':>24}  {'replayed':>24}  equal"]
    lines += [
        f"{row.step:>6}  {row.metric:<{width}}  {_number(row.recorded):>24}  {_number(row.replayed):>24}  "
        f"{'-' if row.equal is None else 'yes' if row.equal else 'no'}"
        for row in rows
    ]
    result = summary(plan, rows)
    changed = f" with {' '.join(plan.changed)}" if plan.changed else " with nothing changed"
    outcome = (
        "the source run recorded none of them"
        if result["equal"] is None
        else f"all {result['num_compared']} metrics are equal bit for bit"
        if result["equal"]
        else f"{result['num_different']} of {result['num_compared']} metrics differ"
    )
    lines.append(
        f"steps {plan.first} to {plan.last - 1} of {plan.source.root}{changed}: {outcome} (replayed in {plan.out})"
    )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else repr(value)

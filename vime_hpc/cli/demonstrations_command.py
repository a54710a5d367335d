"""`vime-hpc data demonstrate`: labels for a supervised warm-up, written in several styles."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from vime_hpc.errors import ConfigError
from vime_hpc.rollout.prompt_file import read_prompt_file


def demonstrate(arguments: argparse.Namespace) -> int:
    """Handler; writes one record per copy of every prompt, its label in a style drawn by weight."""
    styles = [_style(text) for text in arguments.style]
    rng = random.Random(arguments.seed)
    rows = []
    for line, record in read_prompt_file(arguments.prompts).records:
        if arguments.label_key not in record:
            raise ConfigError(
                f"{arguments.prompts}, line {line}: no key {arguments.label_key!r} (--label-key); "
                f"its keys are {', '.join(sorted(map(repr, record)))}"
            )
        for _ in range(arguments.copies):
            pattern = rng.choices([p for p, _ in styles], [weight for _, weight in styles])[0]
            label = pattern.replace("{answer}", str(record[arguments.label_key]))
            rows.append({**record, arguments.label_key: label})
    rng.shuffle(rows)
    _write(Path(arguments.out), rows)
    result = {"file": arguments.out, "records": len(rows), "styles": dict(styles)}
    print(json.dumps(result) if arguments.json else f"{arguments.out}: {len(rows)} demonstrations")
    return 0


def _style(text: str) -> tuple[str, float]:
    """ "{answer}.=0.6" to ("{answer}.", 0.6)."""
    pattern, equals, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = -1.0
    if not equals or "{answer}" not in pattern or value <= 0:
        raise ConfigError(
            f"--style {text!r}: expected a pattern with {{answer}} and a positive weight, as in "
            f"'{{answer}}.=0.6'"
        )
    return pattern, value


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    part.rename(path)

"""`vime-hpc bench compare A B`: what differs between two benchmark records, and by how much."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vime_hpc.launch.compare import compare, read_bench_record

WIDEST = 60


def main(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc bench compare`."""
    found = compare(read_bench_record(Path(arguments.a)), read_bench_record(Path(arguments.b)))
    print(json.dumps(found) if arguments.json else words(found))
    return 0


def words(found: dict[str, Any]) -> str:
    """The comparison for a person."""
    lines = [f"A  {found['a']}", f"B  {found['b']}"]
    lines += [f"note: {note}" for note in found["notes"]]
    lines.append("")
    if not found["differences"]:
        lines.append("What was run, and where: no difference in what both records hold")
    else:
        lines.append("What differs (A -> B)")
    for name, (one, two) in found["differences"].items():
        lines.append(f"  {name}: {_pair(one, two)}")
    lines += ["", f"{'Metric':<36} {'A':>10} {'B':>10} {'B/A':>7}  spread of A, of B"]
    for name, metric in found["metrics"].items():
        ratio = "-" if metric["ratio"] is None else f"{metric['ratio']:.3f}"
        lines.append(
            f"{name:<36} {metric['a']:>10.4g} {metric['b']:>10.4g} {ratio:>7}  "
            f"{_range(metric['a_spread'])}, {_range(metric['b_spread'])}"
            + ("  apart" if metric["apart"] else "")
        )
    if found["only_in_one"]:
        lines.append(f"only in one of them: {', '.join(found['only_in_one'])}")
    if any(metric["apart"] for metric in found["metrics"].values()):
        lines.append("apart: the spreads do not overlap")
    return "\n".join(lines)


def _range(spread: list[float]) -> str:
    low, high = spread
    return f"{low:.4g}" if low == high else f"{low:.4g}..{high:.4g}"


def _pair(one: object, two: object) -> str:
    """Both values, of long ones the part around the first character in which they differ."""
    texts = ["(not there)" if value is None else str(value) for value in (one, two)]
    pairs = enumerate(zip(*texts, strict=False))
    same = next((at for at, (x, y) in pairs if x != y), min(map(len, texts)))
    start = max(0, same - WIDEST // 2) if max(map(len, texts)) > WIDEST else 0
    return " -> ".join(_cut(text, start) for text in texts)


def _cut(text: str, start: int) -> str:
    part = text[start : start + WIDEST]
    return ("..." if start else "") + part + ("..." if start + WIDEST < len(text) else "")

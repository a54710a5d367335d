"""What the `vime-hpc buffer` subcommands do. Each takes the parsed arguments and returns the exit code."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime_hpc.buffer.attempts import list_attempts, names_in
from vime_hpc.buffer.diff import Difference, diff_buffers
from vime_hpc.buffer.export import export as export_steps, json_lines
from vime_hpc.buffer.index import committed_steps, read_commit
from vime_hpc.buffer.journal import replay
from vime_hpc.buffer.layout import JOURNAL_PATTERN, Layout, find_buffer
from vime_hpc.buffer.reader import StepBatch
from vime_hpc.buffer.repair import apply_repair, drop_steps, plan_repair
from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.values import decode_text, nuclei_of
from vime_hpc.buffer.verify import Encode, verify_buffer
from vime_hpc.cli.printable import printable
from vime_hpc.errors import BufferCorruptError, ConfigError
from vime_hpc.types import Sample

GOOD, FAILED, DAMAGED, NOTHING_TO_DO = 0, 1, 3, 4

TEXT_SHOWN = 60
"""Characters of a response in the table of a step; --sample shows all of it."""


def ls(arguments: argparse.Namespace) -> int:
    """One line per committed step from its commit alone, then the groups already acknowledged for open steps."""
    layout = find_buffer(Path(arguments.path))
    rows = [_step_row(layout, step) for step in committed_steps(layout)]
    open_steps = _open_groups(layout)
    damaged = [row for row in rows if row["damage"]]
    if arguments.json:
        _print_json({"steps": rows, "open": open_steps})
        return DAMAGED if damaged else GOOD
    print(
        f"{'step':>7} {'attempt':>7} {'workers':>7} {'groups':>7} {'from disk':>9} {'samples':>8} {'usable':>7} {'tokens':>11} "
        f"{'reward':>8} {'MiB':>9}"
    )
    for row in rows:
        if "samples" in row:
            reward = f"{row['reward_mean']:8.4f}" if row["reward_mean"] is not None else "       -"
            print(
                f"{row['step']:>7} {row['attempt']:>7} {row['workers']:>7} {row['groups']:>7} {row['recovered_groups']:>9} "
                f"{row['samples']:>8} {row['usable']:>7} {row['tokens']:>11} {reward} {row['bytes'] / 2**20:9.1f}"
            )
        for message in row["damage"]:
            print(f"{row['step']:>7} DAMAGED: {message}")
    for step, count in open_steps.items():
        print(f"{step:>7} open: {count} groups acknowledged")
    if damaged:
        print(
            f"{len(damaged)} of {len(rows)} steps are damaged; details: vime-hpc buffer verify {layout.root}"
        )
    return DAMAGED if damaged else GOOD


def show(arguments: argparse.Namespace) -> int:
    """The schema; a step's samples; or one sample token by token."""
    buffer = RolloutBuffer.open(arguments.path)
    if arguments.step is None and arguments.sample is None:
        return _show_buffer(buffer, arguments.json)
    steps = [arguments.step] if arguments.step is not None else buffer.steps()
    missing = [step for step in steps if step not in buffer.steps()]
    if missing:
        raise ConfigError(
            f"{buffer.layout.root}: step {missing[0]} is not committed; committed: {_span(buffer.steps())}"
        )
    if arguments.sample is None:
        return _show_step(buffer, arguments.step, arguments.json)
    for step in steps:
        batch = buffer.batch(step)
        rows = (batch.table.sample_id == arguments.sample).nonzero()[0]
        if rows.size:
            sample = batch.read([int(rows[0])])[0]
            batch.close()
            print(
                _sample_json(buffer, step, sample.sample_id)
                if arguments.json
                else _sample_text(step, sample, buffer.schema)
            )
            return GOOD
        batch.close()
    raise ConfigError(
        f"{buffer.layout.root}: no sample {arguments.sample} in steps {_span(steps)}; "
        f"ids of a step: vime-hpc buffer show {arguments.path} --step N"
    )


def verify(arguments: argparse.Namespace) -> int:
    """Every finding, one a line; exit code 3 when something is damaged or cannot be trained on."""
    layout = find_buffer(Path(arguments.path))
    encode = _tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    counts: Counter[str] = Counter()
    findings = []
    for finding in verify_buffer(
        layout, first_step=arguments.first_step, last_step=arguments.last_step, encode=encode
    ):
        counts[finding.kind] += 1
        findings.append(finding.to_json())
        if not arguments.json:
            place = ", ".join(
                f"{key} {value}"
                for key, value in (
                    ("step", finding.step),
                    ("sample", finding.sample_id),
                    ("column", finding.column),
                )
                if value is not None
            )
            print(
                f"{finding.kind}: {finding.file}{f' ({place})' if place else ''}: {finding.message}"
            )
    bad = counts["damage"] + counts["bad_value"]
    if arguments.json:
        _print_json({"findings": findings, "good": not bad})
    else:
        print(
            f"{len(committed_steps(layout))} committed steps, {counts['damage']} damaged, {counts['bad_value']} bad values, "
            f"{counts['information']} notes"
        )
    return DAMAGED if bad else GOOD


def export(arguments: argparse.Namespace) -> int:
    """Write the steps in another format."""
    buffer = RolloutBuffer.open(arguments.path)
    steps = _chosen(buffer, arguments)
    output = Path(arguments.output)
    if not output.parent.is_dir():
        raise ConfigError(
            f"--output {output}: there is no directory {output.parent}; make it first: mkdir -p {shlex.quote(str(output.parent))}"
        )
    if output.is_dir() and arguments.format != "slime":
        raise ConfigError(f"--output {output} is a directory; name a file")
    paths = export_steps(buffer, steps, arguments.format, output)
    if arguments.json:
        _print_json(
            {"format": arguments.format, "steps": steps, "files": [str(path) for path in paths]}
        )
    else:
        print(
            f"wrote {', '.join(map(str, paths[:3]))}{' ...' if len(paths) > 3 else ''} ({len(steps)} steps)"
        )
    return GOOD


def diff(arguments: argparse.Namespace) -> int:
    """Exit code 0 when both hold the same samples bit for bit, 1 when not."""
    left, right = RolloutBuffer.open(arguments.path), RolloutBuffer.open(arguments.other)
    counts: Counter[str] = Counter()
    shown: list[Difference] = []
    for difference in diff_buffers(
        left, right, first_step=arguments.first_step, last_step=arguments.last_step
    ):
        counts[difference.column] += 1
        if len(shown) < arguments.limit:
            shown.append(difference)
    total = sum(counts.values())
    if arguments.json:
        _print_json(
            {
                "equal": not total,
                "counts": dict(counts),
                "differences": [entry.to_json() for entry in shown],
            }
        )
        return FAILED if total else GOOD
    for entry in shown:
        print(f"step {entry.step} sample {entry.sample_id} {entry.column}: {entry.message}")
    print(
        f"{total} differences"
        + (
            f": {', '.join(f'{name} {count}' for name, count in counts.most_common())}"
            if total
            else ""
        )
    )
    return FAILED if total else GOOD


def drop(arguments: argparse.Namespace) -> int:
    """Remove steps, after --yes."""
    layout = find_buffer(Path(arguments.path))
    steps = [step for step in committed_steps(layout) if step >= arguments.from_step]
    removed = drop_steps(layout, arguments.from_step) if arguments.yes else []
    if arguments.json:
        _print_json({"steps": steps, "removed": removed})
    elif arguments.yes:
        print(f"removed {len(steps)} committed steps ({len(removed)} names)")
    else:
        print(
            f"would remove steps {_span(steps)}; a trainer whose checkpoint is behind them generates them again. Do it with --yes"
        )
    return GOOD if steps or removed else NOTHING_TO_DO


def repair(arguments: argparse.Namespace) -> int:
    """Plan, or with --yes carry out, what can be repaired without losing committed data."""
    layout = find_buffer(Path(arguments.path))
    plans = plan_repair(layout)
    done = apply_repair(layout, plans) if arguments.yes else []
    left = [plan for plan in plans if plan.kind == "needs_drop"] if arguments.yes else plans
    if arguments.json:
        _print_json(
            {
                "plan": [
                    {"kind": plan.kind, "step": plan.step, "reason": plan.reason} for plan in plans
                ],
                "done": done,
            }
        )
    else:
        for plan in plans:
            print(f"step {plan.step}: {plan.kind.replace('_', ' ')}: {plan.reason}")
        for line in done:
            print(line)
        if plans and not arguments.yes:
            print(
                "do it with --yes; damaged segments stay where they are until: vime-hpc buffer drop"
            )
    if left:
        return DAMAGED
    return GOOD if plans or done else NOTHING_TO_DO


# --- rendering --------------------------------------------------------------------------------------------------------


def _step_row(layout: Layout, step: int) -> dict[str, Any]:
    try:
        commit = read_commit(layout, step)
    except BufferCorruptError as error:
        return {"step": step, "damage": [str(error)]}
    entries = [worker["segment"] for worker in commit["workers"]]
    total = {
        name: sum(entry[f"num_{name}"] for entry in entries)
        for name in ("samples", "groups", "recovered_groups", "usable", "tokens")
    }
    reward = (
        math.fsum(entry["reward_sum"] for entry in entries) / total["usable"]
        if total["usable"]
        else None
    )
    damage = []
    for entry in entries:
        path = layout.root / entry["file"]
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            damage.append(
                f"{entry['file']} "
                + (
                    "is missing"
                    if size is None
                    else f"has {size} bytes, committed with {entry['bytes']}"
                )
            )
    return {
        "step": step,
        "attempt": commit["attempt"],
        "workers": commit["num_workers"],
        **total,
        "bytes": sum(entry["bytes"] for entry in entries),
        "reward_mean": reward,
        "damage": damage,
    }


def _open_groups(layout: Layout) -> dict[int, int]:
    committed = set(committed_steps(layout))
    schema = RolloutBuffer(layout).schema
    groups: dict[int, set[int]] = {}
    for directory in list_attempts(layout):
        for path in names_in(directory.path):
            match = JOURNAL_PATTERN.fullmatch(path.name)
            if match and int(match[1]) not in committed:
                known = groups.setdefault(int(match[1]), set())
                for record in replay(path, schema).records:
                    (known.discard if record.group is None else known.add)(record.group_id)
    return {step: len(known) for step, known in sorted(groups.items())}


def _show_buffer(buffer: RolloutBuffer, as_json: bool) -> int:
    steps = buffer.steps()
    description = {
        "run_id": buffer.run_id,
        "format_version": 1,
        "schema": buffer.schema.to_json(),
        "filters": [],
        "columns": list(buffer.schema.column_names),
        "committed_steps": [steps[0], steps[-1]] if steps else [],
    }
    if as_json:
        _print_json(description)
        return GOOD
    print(f"run {buffer.run_id}, committed steps {_span(steps)}, filters: none (contiguous)")
    print(f"schema {json.dumps(buffer.schema.to_json())}")
    for column in buffer.schema.scalars + buffer.schema.ragged:
        print(
            f"  {column.name:28} {column.dtype:4} per {column.axis:15} [{column.unit}] {column.meaning}"
        )
    if buffer.schema.routing is not None:
        print(
            f"  {'routed_experts':28} {buffer.schema.routing.dtype.str[1:]:4} per layer, row, place [expert id] {buffer.schema.routing}"
        )
    return GOOD


def _show_step(buffer: RolloutBuffer, step: int, as_json: bool) -> int:
    batch = buffer.batch(step)
    table = batch.table
    texts = _texts(batch, "response_text")
    batch.close()
    rows = [
        {
            "sample_id": int(table.sample_id[row]),
            "group_id": int(table.group_id[row]),
            "prompt_length": int(table.prompt_length[row]),
            "response_length": int(table.response_length[row]),
            "mask_sum": int(table.mask_sum[row]),
            "weight_version": int(table.weight_version[row]),
            "truncated": bool(table.truncated[row]),
            "reward": float(table.reward[row]) if table.reward_usable[row] else None,
            "response_text": texts[int(table.sample_id[row])],
        }
        for row in range(len(table))
    ]
    if as_json:
        _print_json(
            {
                "step": step,
                "samples": rows,
                "stats": {
                    name: str(value) if not math.isfinite(value) else value
                    for name, value in batch.stats.items()
                },
            }
        )
        return GOOD
    print("\n".join(_step_lines(rows)))
    return GOOD


def _texts(batch: StepBatch, column: str) -> dict[int, str]:
    """sample_id -> text of a text column."""
    values, offsets = batch.column(column)
    assert offsets is not None
    raw = values.tobytes()
    return {
        int(sample_id): raw[first:last].decode("utf-8", "surrogatepass")
        for sample_id, first, last in zip(
            batch.segment_ids(), offsets[:-1], offsets[1:], strict=True
        )
    }


def _step_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lengths in tokens; the beginning of the response on one line."""
    lines = [
        f"{'sample':>14} {'group':>8} {'prompt':>7} {'response':>8} {'trained':>8} {'version':>7} {'reward':>9}  text"
    ]
    for row in rows:
        reward = "unusable" if row["reward"] is None else f"{row['reward']:.4f}"
        text = printable(row["response_text"]).replace("\n", "\\n").replace("\t", "\\t")
        if len(text) > TEXT_SHOWN:
            text = f"{text[:TEXT_SHOWN]}..."
        lines.append(
            f"{row['sample_id']:>14} {row['group_id']:>8} {row['prompt_length']:>7} {row['response_length']:>8} "
            f"{row['mask_sum']:>8} {row['weight_version']:>7} {reward:>9}  {text}"
            f"{' [truncated]' if row['truncated'] else ''}"
        )
    return lines


def _sample_json(buffer: RolloutBuffer, step: int, sample_id: int) -> str:
    return next(
        line for line in json_lines(buffer, [step]) if json.loads(line)["sample_id"] == sample_id
    )


def _sample_text(step: int, sample: Sample, schema: BufferSchema) -> str:
    reward = f"unusable ({sample.reward_cause})" if sample.reward is None else f"{sample.reward!r}"
    present = [column for column in schema.optional_columns if column.name in sample.columns]
    optional = [column.name for column in present if column.axis == "response_token"]
    texts = [column.name for column in present if column.text]
    nuclei = nuclei_of(sample)
    lines = [
        f"sample {sample.sample_id} of step {step}: group {sample.group_id}, index {sample.index_in_group}, prompt "
        f"{sample.prompt_id}, attempt {sample.attempt}, seed {sample.seed}",
        f"status {sample.status.value} ({sample.finish_reason or 'no reason given'}), reward {reward}",
        f"{sample.prompt_length} prompt tokens, {sample.response_length} response tokens, {int(sample.loss_mask.sum())} trained",
        f"metadata {json.dumps(sample.metadata)}",
        *(f"{name} {printable(decode_text(sample.columns[name]))}" for name in texts),
        "--- prompt",
        printable(sample.prompt_text),
        "--- response",
        printable(sample.response_text),
        "--- response tokens",
        f"{'place':>7} {'token':>8} {'mask':>5} {'logprob':>11} {'version':>8}"
        + "".join(f" {name:>16}" for name in optional)
        + ("" if nuclei is None else "  top-p ids"),
    ]
    starts = [span.start for span in sample.versions]
    for place in range(sample.response_length):
        spans = [
            span.version
            for span, start in zip(sample.versions, starts, strict=True)
            if start <= place
        ]
        lines.append(
            f"{place:>7} {sample.tokens[sample.prompt_length + place]:>8} {sample.loss_mask[place]:>5} "
            f"{sample.rollout_logprobs[place]:>11.5f} {spans[-1] if spans else '-':>8}"
            + "".join(f" {sample.columns[name][place]:>16.6g}" for name in optional)
            + ("" if nuclei is None else f"  {_abridged(nuclei[place].tolist())}")
        )
    return "\n".join(lines)


def _abridged(ids: list[int]) -> str:
    return " ".join(map(str, ids[:8])) + (f" ... ({len(ids)})" if len(ids) > 8 else "")


def _tokenizer(directory: str) -> Encode:
    try:
        module = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError("--tokenizer needs transformers; pip install transformers") from error
    tokenizer = module.AutoTokenizer.from_pretrained(directory)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def _chosen(buffer: RolloutBuffer, arguments: argparse.Namespace) -> list[int]:
    steps = [
        step
        for step in buffer.steps()
        if step >= arguments.first_step
        and (arguments.last_step is None or step <= arguments.last_step)
    ]
    if not steps:
        raise ConfigError(
            f"{buffer.layout.root}: no committed step in {arguments.first_step}..{arguments.last_step}; "
            f"committed: {_span(buffer.steps())}"
        )
    return steps


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]}..{steps[-1]}" if steps else "none"


def _print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False, indent=1))

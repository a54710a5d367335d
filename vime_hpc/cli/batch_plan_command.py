"""What `vime-hpc batch-plan` does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.config.load import build_config, parse_override, read_resolved
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError
from vime_hpc.trainer.shares import step_shares
from vime_hpc.types import SampleTable

FILLER_TOKENS = 2
"""Tokens of a microbatch that holds no sample (see trainer/microbatch.py)."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One microbatch: [samples] ids, their tokens, and those added to fill it up."""

    samples: list[int]
    tokens: int
    padding: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One data parallel rank in one optimizer update."""

    update: int
    dp_rank: int
    microbatches: list[Packed]

    @property
    def tokens(self) -> int:
        return sum(packed.tokens for packed in self.microbatches)

    @property
    def padding(self) -> int:
        return sum(packed.padding for packed in self.microbatches)


def run(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc batch-plan`."""
    config = _config(arguments)
    root = config.run.train_from or arguments.run
    buffer = RolloutBuffer.open(root)
    if arguments.step not in buffer.steps():
        raise ConfigError(
            f"{buffer.layout.root} has no committed step {arguments.step}; it has "
            f"{', '.join(map(str, buffer.steps()[-8:])) or 'none'} (all: vime-hpc buffer ls {root})"
        )
    batch = buffer.batch(arguments.step)
    table = batch.table
    batch.close()
    ranks = plan_ranks(table, config)
    result = summary(table, config, ranks, arguments.step)
    print(json.dumps(result) if arguments.json else words(result, with_samples=arguments.samples))
    return 0


def plan_ranks(table: SampleTable, config: RunConfig) -> list[RankPlan]:
    """Every update's microbatches on every data parallel rank, as the trainer makes them."""
    trainer = config.trainer
    dp = trainer.num_ranks // (trainer.tp * trainer.pp * trainer.cp)
    multiple = trainer.tp if trainer.sequence_parallel else 1
    lengths = table.prompt_length + table.response_length
    return [
        RankPlan(update, rank, [_packed(rows, table, lengths, multiple) for rows in microbatches])
        for update, share in enumerate(step_shares(table, config.algorithm))
        for rank, microbatches in enumerate(
            share.plan(table, dp, trainer.max_tokens_per_microbatch)
        )
    ]


def _packed(
    rows: Sequence[int], table: SampleTable, lengths: np.ndarray[Any, Any], multiple: int
) -> Packed:
    tokens = int(lengths[list(rows)].sum()) if rows else 0
    filler = 0 if rows else FILLER_TOKENS
    return Packed(
        [int(table.sample_id[row]) for row in rows],
        tokens,
        filler + -(tokens + filler) % multiple,
    )


def summary(
    table: SampleTable, config: RunConfig, ranks: Sequence[RankPlan], step: int
) -> dict[str, Any]:
    """The plan and what it costs, as plain values.

    `padding_share` is of all tokens computed, `imbalance` the fullest rank's tokens over the mean (the worst update),
    `bubble_share` the idle share of a 1F1B pipeline with as many equal microbatches.
    """
    trainer = config.trainer
    by_update = [[r for r in ranks if r.update == u] for u in sorted({r.update for r in ranks})]
    tokens, padding = sum(r.tokens for r in ranks), sum(r.padding for r in ranks)
    planned = sum(len(packed.samples) for r in ranks for packed in r.microbatches)
    count = max(len(part[0].microbatches) for part in by_update)
    return {
        "step": step,
        "num_samples": len(table),
        "num_left_out": len(table) - planned,
        "tp": trainer.tp,
        "pp": trainer.pp,
        "dp": len(by_update[0]),
        "max_tokens_per_microbatch": trainer.max_tokens_per_microbatch,
        "num_updates": len(by_update),
        "num_microbatches": sum(len(part[0].microbatches) for part in by_update),
        "tokens": tokens,
        "padding_tokens": padding,
        "padding_share": padding / (tokens + padding),
        "imbalance": max(_imbalance([r.tokens for r in part]) for part in by_update),
        "bubble_share": (trainer.pp - 1) / (count + trainer.pp - 1),
        "ranks": [asdict(r) | {"tokens": r.tokens, "padding": r.padding} for r in ranks],
    }


def _imbalance(tokens: Sequence[int]) -> float:
    return max(tokens) * len(tokens) / sum(tokens)


def words(result: dict[str, Any], *, with_samples: bool) -> str:
    """One line a rank, and what the plan comes to."""
    lines = [
        f"{'update':>6} {'dp rank':>7} {'microbatches':>12} {'samples':>8} {'tokens':>9} {'padding':>8}  tokens of each"
    ]
    for rank in result["ranks"]:
        parts = rank["microbatches"]
        lines.append(
            f"{rank['update']:>6} {rank['dp_rank']:>7} {len(parts):>12} {sum(len(p['samples']) for p in parts):>8} "
            f"{rank['tokens']:>9} {rank['padding']:>8}  {' '.join(str(p['tokens']) for p in parts)}"
        )
        if with_samples:
            lines += [
                f"{'':>15}microbatch {number}: samples {' '.join(map(str, part['samples'])) or 'none (filler)'}"
                for number, part in enumerate(parts)
            ]
    lines.append(
        f"step {result['step']}: {result['num_samples']} samples, {result['num_left_out']} left out (no weight in the "
        f"loss); {result['num_microbatches']} microbatches a rank of at most {result['max_tokens_per_microbatch']} tokens "
        f"over tp {result['tp']} x pp {result['pp']} x dp {result['dp']}"
    )
    lines.append(
        f"padding {result['padding_share']:.2%} of the tokens, fullest rank {result['imbalance']:.3f} times the mean"
        + (f", pipeline idle {result['bubble_share']:.1%}" if result["pp"] > 1 else "")
    )
    return "\n".join(lines)


def _config(arguments: argparse.Namespace) -> RunConfig:
    """The run's configuration with the command line's layout; the number of ranks follows from it."""
    config = read_resolved(RunPaths(arguments.run).config)
    tree = config.model_dump(mode="json")
    for text in arguments.overrides:
        keys, value = parse_override(text)
        at = tree
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = value
    trainer = tree["trainer"]
    dp = arguments.dp or trainer["num_ranks"] // (trainer["tp"] * trainer["pp"] * trainer["cp"])
    for name in ("tp", "pp"):
        trainer[name] = getattr(arguments, name) or trainer[name]
    trainer["num_ranks"] = dp * trainer["tp"] * trainer["pp"] * trainer["cp"]
    if arguments.tokens_per_microbatch is not None:
        trainer["max_tokens_per_microbatch"] = arguments.tokens_per_microbatch
    return build_config(tree)

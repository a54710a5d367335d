"""What `vime-hpc plan` does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.engine.expected import EngineShape, expected_layout
from vime_hpc.errors import ConfigError
from vime_hpc.trainer.expected import expected_specs, sender_names
from vime_hpc.trainer.layout import check_layout, read_hf_config
from vime_hpc.weights.engine_layout import EngineLayout
from vime_hpc.weights.plan import WeightPlan, build_plan, why_whole
from vime_hpc.weights.safetensors_index import tensor_specs

Result = dict[str, Any]
MIB = 2**20


def run(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc plan`."""
    first = Path(arguments.source[0])
    if first.is_dir():
        result = recorded(first)
    else:
        config = load_config([Path(path) for path in arguments.source], arguments.overrides)
        result = expected(config)
    print(json.dumps(result) if arguments.json else words(result, buckets=arguments.buckets))
    return 0


def expected(config: RunConfig) -> Result:
    """The plan of a run with this configuration, as far as it can be told without starting it.

    Raises:
        ConfigError: no engines, no such model, or a layout that cannot cut it.
    """
    if not config.engine.num_engines:
        raise ConfigError(
            "engine.num_engines = 0: no weights travel in this run; set it to 1 or more to see a plan"
        )
    model_dir, dtype = Path(config.model.path), config.model.dtype
    hf = read_hf_config(model_dir)
    check_layout(hf, config.trainer)
    shapes = {name: shape for name, (_, shape) in tensor_specs(model_dir).items()}
    specs = expected_specs(shapes, hf, config.trainer, dtype)
    plan = build_plan(specs, config.weights.bucket_mib)
    engines = EngineShape(
        config.engine.num_engines,
        config.engine.tp,
        bool(config.vllm.get("enable-expert-parallel", False)),
    )
    layout = expected_layout(shapes, hf, engines, dtype)
    why = why_whole(config.weights.send, config.engine.tp, config.weights.transport)
    plan = plan.sent_whole(why) if why else plan.with_layout(layout)
    return summary(plan, layout, config.engine.tp, config.trainer.pp) | {"kind": "expected"}


def recorded(run_directory: Path) -> Result:
    """The plan the newest start of a run went by.

    Raises:
        ConfigError: not a run directory, or the run has not built its bridge yet.
    """
    paths = RunPaths(run_directory)
    if not paths.config.is_file():
        raise ConfigError(f"{run_directory} is not a run directory: there is no config.json in it")
    files = sorted(paths.weight_plans(), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ConfigError(
            f"{run_directory}: no attempt has written a weight plan; it is there once the engines are up. What is "
            f"expected before: vime-hpc plan CONFIG…"
        )
    plan = WeightPlan.from_json(files[-1].read_text())
    config = json.loads(paths.config.read_text())
    tp, pp = int(config["engine"]["tp"]), int(config["trainer"]["pp"])
    return summary(plan, plan.layout, tp, pp) | {"kind": "recorded", "file": str(files[-1])}


def summary(plan: WeightPlan, layout: EngineLayout | None, tp: int, pp: int) -> Result:
    """The plan as plain values; bytes are of tensors without the padding between them.

    Args:
        layout: what engine ranks hold, where it is known although they are sent everything.
        tp: ranks per engine. pp: the trainer's pipeline stages.
    """
    names = sender_names(plan.num_sources, pp)
    return {
        "tensors": len(plan.names),
        "nbytes": sum(t.nbytes for bucket in plan.buckets for t in bucket.tensors),
        "num_parts": plan.num_parts,
        "whole": plan.whole,
        "unknown": list(layout.unknown) if layout else [],
        "digest": plan.digest,
        "senders": [_sender(plan, source, name) for source, name in enumerate(names)],
        "engine_ranks": _engine_ranks(plan, layout, tp),
        "buckets": _buckets(plan),
    }


def _sender(plan: WeightPlan, source: int, name: str) -> Result:
    rounds = plan.rounds(source)
    return {
        "sender": source,
        "name": name,
        "tensors": sum(len(one.bucket.tensors) for one in rounds),
        "buckets": len(rounds),
        "sent_bytes": sum(b.nbytes for one in rounds for _, b in one.sent),
    }


def _engine_ranks(plan: WeightPlan, layout: EngineLayout | None, tp: int) -> list[Result]:
    part_of: Sequence[int] = layout.part_of if layout else ()
    ranks = []
    for rank, part in enumerate(part_of):
        received = plan.received(part if plan.layout else 0)
        held = layout.held[part] if layout else 0
        ranks.append(
            {
                "engine": rank // tp,
                "rank": rank % tp,
                "part": part if plan.layout else 0,
                "received_bytes": received,
                "held_bytes": held,
                "received_over_held": received / held,
            }
        )
    return ranks


def _buckets(plan: WeightPlan) -> list[Result]:
    """In the order in which they travel."""
    return [
        {
            "sender": one.bucket.source,
            "tensors": len(one.bucket.tensors),
            "first": one.bucket.tensors[0].name,
            "sent_bytes": {str(part): bucket.nbytes for part, bucket in one.sent},
        }
        for one in plan.all_rounds
    ]


def words(result: Result, *, buckets: bool) -> str:
    """One line a sender and an engine rank, and what is sent whole."""
    lines = [
        f"{result['kind']} plan: {result['tensors']} tensors, {result['nbytes'] / MIB:.1f} MiB in "
        f"{len(result['buckets'])} buckets; plan digest {result['digest']}"
    ]
    lines += [
        f"  sender {s['sender']} ({s['name']}): {s['tensors']} tensors in {s['buckets']} buckets, sends "
        f"{s['sent_bytes'] / MIB:.1f} MiB"
        for s in result["senders"]
    ]
    if buckets:
        lines += [_bucket_line(number, one) for number, one in enumerate(result["buckets"], 1)]
    lines += [
        f"  engine {r['engine']} rank {r['rank']} (part {r['part']}): receives {r['received_bytes'] / MIB:.1f} MiB, holds "
        f"{r['held_bytes'] / MIB:.1f} MiB, ratio {r['received_over_held']:.3f}"
        for r in result["engine_ranks"]
    ]
    if result["whole"]:
        lines.append(f"every engine rank is sent every tensor whole ({result['whole']})")
    if result["unknown"]:
        names = ", ".join(result["unknown"])
        lines.append(
            f"sent whole, since vLLM's loader reads them otherwise than as a slice: {names}"
        )
    return "\n".join(lines)


def _bucket_line(number: int, bucket: Result) -> str:
    sizes = [f"{n / MIB:.2f} MiB to part {part}" for part, n in bucket["sent_bytes"].items()]
    return (
        f"    bucket {number} of sender {bucket['sender']}: {bucket['tensors']} tensors from {bucket['first']}; "
        f"{', '.join(sizes) or 'nobody holds any of it'}"
    )

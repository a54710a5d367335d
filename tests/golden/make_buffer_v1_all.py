"""Made tests/golden/buffer-v1-all, with every optional column, once. Run again only for a new format version, into a new name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from vime_hpc.buffer.columns import OPTIONAL
from vime_hpc.buffer.export import json_lines
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.testing.buffer_suite import make_group


def main() -> None:
    target = Path(sys.argv[1])
    schema = BufferSchema(
        RoutingShape(num_layers=3, top_k=2, num_experts=8),
        optional=tuple(column.name for column in OPTIONAL),
        sampling_temperature=0.8,
    )
    buffer = RolloutBuffer.create(target, run_id="golden-1-all", schema=schema)
    with BufferWriter(target, producer="golden") as sink:
        for step in range(3):
            groups = [
                make_group(schema, 2 * step + index, size=3, response=6) for index in range(2)
            ]
            # One sample of each step has none of the optional columns, and one no usable reward.
            bare = replace(groups[0].samples[0], columns={}, routed_experts=None)
            unusable = groups[1].samples[2].with_reward(None, "verifier timed out")
            groups[0] = replace(groups[0], samples=(bare, *groups[0].samples[1:]))
            groups[1] = replace(groups[1], samples=(*groups[1].samples[:2], unusable))
            sink.append(step, groups, resume_state={"cursor": 2 * (step + 1)}, stats={})
        sink.journal_group(3, make_group(schema, 8))
    for path in target.glob("journal/*/worker-*.json"):
        path.unlink()  # names the machine; not needed to go on
    target.with_suffix(".jsonl").write_text(
        "".join(line + "\n" for line in json_lines(buffer, buffer.steps()))
    )


if __name__ == "__main__":
    main()

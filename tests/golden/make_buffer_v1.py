"""Made tests/golden/buffer-v1 and its expected samples, once. Run again only for a new format version, into a new name."""

from __future__ import annotations

import sys
from pathlib import Path

from vime_hpc.buffer.export import json_lines
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.testing.buffer_suite import make_group


def main() -> None:
    target = Path(sys.argv[1])
    schema = BufferSchema(
        RoutingShape(num_layers=2, top_k=2, num_experts=300),
        optional=("ref_logprobs", "image_xxh3_64"),
    )
    buffer = RolloutBuffer.create(target, run_id="golden-1", schema=schema)
    for worker in range(2):
        with BufferWriter(target, worker=worker, num_workers=2, producer="golden") as sink:
            for step in range(2):
                groups = [make_group(schema, 4 * step + 2 * index + worker) for index in range(2)]
                sink.append(
                    step, groups, resume_state={"cursor": 4 * (step + 1)}, stats={"num_dropped": 1}
                )
            if worker == 0:
                sink.journal_group(2, make_group(schema, 8))
    for path in target.glob("journal/*/worker-*.json"):
        path.unlink()  # names the machine; not needed to go on
    target.with_suffix(".jsonl").write_text(
        "".join(line + "\n" for line in json_lines(buffer, [0, 1]))
    )


if __name__ == "__main__":
    main()

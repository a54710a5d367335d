"""The sampling seed of every request, from what the request is and nothing else."""

from __future__ import annotations

import struct

import xxhash

SEED_BITS = 63
"""vLLM takes a signed 64-bit seed; 0 is left to it. torch's CPU generator uses the low 32 bits,
which are mixed as well.
"""


def request_seed(run_seed: int, *, step: int, group_id: int, index_in_group: int, attempt: int = 0,
                 turn: int = 0, purpose: str = "rollout") -> int:  # fmt: skip
    """A seed in 1 .. 2**63 - 1.

    No two requests of a run share one but by chance (2**-63 each pair), and the same request gets
    the same one on every machine and after every restart.

    Args:
        run_seed: run.seed.
        step: the step the request is made for.
        group_id, index_in_group: which rollout.
        attempt: how often this rollout was started before.
        turn: model call inside the rollout.
        purpose: keeps evaluation apart from training.
    """
    packed = struct.pack("<6q", run_seed, step, group_id, index_in_group, attempt, turn)
    value = xxhash.xxh3_64_intdigest(purpose.encode() + b"\0" + packed) & ((1 << SEED_BITS) - 1)
    return value or 1

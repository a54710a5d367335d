#!/usr/bin/env python3
"""Kill a buffer writer at random moments, ten thousand times by default, and count what was lost, wrong or unreadable.

    python tools/crash_buffer.py --kills 10000 [--dir DIR] [--seed N] [--no-fsync] [--every-flip]

Exit code 0 when nothing was; 1 otherwise. --every-flip also flips every byte of a small segment and reads it back.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from vime_hpc.buffer.files import Disk
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.testing.buffer_crash import (
    SCHEMA,
    CrashReport,
    flip_segment_bytes,
    random_kills,
    write_steps,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument(
        "--dir", type=Path, help="where to work: a directory on the file system in question"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        help="default: the clock; printed, to repeat a run",
    )
    parser.add_argument(
        "--no-fsync", action="store_true", help="skip fsync: as good against SIGKILL, and faster"
    )
    parser.add_argument(
        "--every-flip", action="store_true", help="also flip every byte of a small segment"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    total, start = CrashReport(), time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as work:
        if arguments.every_flip:
            root = Path(work) / "flips"
            RolloutBuffer.create(root, run_id="crash", schema=SCHEMA, durable=False)
            write_steps(root, 0, 1, Disk(durable=False), lambda line: None)
            refused, unharmed = flip_segment_bytes(root, None, seed=arguments.seed)
            print(
                f"every byte flipped: {refused} refused, {unharmed} right samples, 0 wrong",
                flush=True,
            )
        while total.kills < arguments.kills:
            part = random_kills(
                Path(work),
                min(100, arguments.kills - total.kills),
                seed=arguments.seed + total.kills,
                durable=not arguments.no_fsync,
            )
            for name in ("kills", "acknowledged", "lost", "wrong", "unreadable"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            print(f"{time.monotonic() - start:7.0f} s: {total}", flush=True)
    return 1 if total.lost or total.wrong or total.unreadable else 0


if __name__ == "__main__":
    sys.exit(main())

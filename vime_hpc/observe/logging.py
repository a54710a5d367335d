"""Logs: each process writes its own file in the attempt's directory; the launcher's terminal shows only progress."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s {name} %(name)s: %(message)s"


def start_logging(name: str, level: str) -> None:
    """Log to standard error (the launcher sends it to the rank's file), every line naming the rank."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT.format(name=name)))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("urllib3", "asyncio", "megatron", "h5py", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)

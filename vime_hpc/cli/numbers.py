"""Types for argparse: a number that cannot be is a usage error with one line, not a traceback later."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def nonnegative_int(text: str) -> int:
    """0 or more."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)

"""Overrides are taken off the command line before argparse sees it, which takes a word with a space for a file."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

_OVERRIDE = re.compile(r"--(?:[\w-]+\.[^=\s]+|(?:vllm|router)-[\w.-]+)=")


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The other words, and those of the form --section.option=value, --vllm-OPTION=value, --router-OPTION=value."""
    others = [word for word in words if not _OVERRIDE.match(word)]
    return others, [word for word in words if _OVERRIDE.match(word)]


def parse_with_overrides(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """argparse's arguments, and the overrides: all that is left over, for the configuration to check."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments, rest = parser.parse_known_args(words)
    return arguments, [*overrides, *rest]

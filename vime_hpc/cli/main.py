"""The `vime-hpc` command: parses, hands over to a command's own module, turns errors into one message and an exit code.

Nothing heavier than argparse is imported before a command is chosen, so --help answers at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import traceback
from pathlib import Path

from vime_hpc import __version__
from vime_hpc.cli import COMMANDS
from vime_hpc.cli.overrides import parse_with_overrides
from vime_hpc.errors import ConfigError, VimeError

EXIT_CODES = "exit codes: 0 good, 1 failed, 2 usage or configuration, 3 damaged data, 4 nothing to do, 75 requeue wanted"

ENVIRONMENT = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "your quota there is used up: free some space, or write elsewhere",
    errno.EROFS: "the file system is mounted read-only here; write elsewhere",
    errno.EIO: "the device or the file server failed; try again, and tell the site if it stays so",
    errno.ESTALE: "the file server lost the file; try again",
}
"""Errors of the operating system that are nobody's mistake in this program, and what to do."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = build_parser()
    arguments, rest = parse_with_overrides(parser, argv)
    if not hasattr(arguments, "handler"):
        parser.print_help()
        return 2
    if rest and not getattr(arguments, "takes_overrides", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.overrides = rest
    module_name, _, name = arguments.handler.partition(":")
    try:
        return int(getattr(importlib.import_module(module_name), name)(arguments))
    except VimeError as error:
        print(f"vime-hpc {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except PermissionError as error:
        print(f"vime-hpc {arguments.command}: {not_permitted(error)}", file=sys.stderr)
        return ConfigError.exit_code
    except OSError as error:
        if error.errno not in ENVIRONMENT:
            return _unexpected(arguments.command)
        print(f"vime-hpc {arguments.command}: {error}; {ENVIRONMENT[error.errno]}", file=sys.stderr)
        return 1
    except Exception:  # noqa: BLE001 - the last line of defence says what it does not know
        return _unexpected(arguments.command)


def not_permitted(error: PermissionError) -> str:
    """Whose file it is and what to do; a run of somebody else's is the usual case."""
    me = f"user id {os.getuid()}"
    if error.filename is None:
        return f"{error} (this process is {me})"
    path = Path(os.fsdecode(error.filename)).absolute()
    for place in (path, *path.parents):
        try:
            owner = place.stat().st_uid
        except OSError:
            continue
        return (
            f"{path}: permission denied to {me}; {place} belongs to user id {owner}. A run directory is its owner's alone: "
            f"the owner can set run.share_with_group = true before the first start, or chmod -R g+rX it"
        )
    return f"{path}: permission denied to {me}"


def _unexpected(command: str) -> int:
    """Called while an exception is handled."""
    traceback.print_exc()
    print(
        f"vime-hpc {command}: the error above is not one this command expects; please report it",
        file=sys.stderr,
    )
    return 1


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="vime-hpc",
        description="RL post-training of language models as one Slurm job, without Ray.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"vime-hpc {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in COMMANDS:
        importlib.import_module(f"vime_hpc.cli.{module}").register(subparsers)
    return parser

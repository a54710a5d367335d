"""`vime-hpc buffer`: look into the rollout buffer, check it, hand it to other tools, repair it. Parsing only."""

from __future__ import annotations

import argparse

_IMPL = "vime_hpc.cli.buffer_commands"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `buffer` command and its own subcommands."""
    parser = subparsers.add_parser(
        "buffer",
        help="list, show, verify, export, compare and repair rollouts on disk",
        description="The rollout buffer of a run: ordinary HDF5 files, a commit per step.",
    )
    commands = parser.add_subparsers(dest="buffer_command", metavar="COMMAND", required=True)

    _command(
        commands,
        "ls",
        "committed steps, their sizes and rewards, and what the open step has so far",
    )
    show = _command(
        commands, "show", "the buffer's schema, or the samples of a step in readable columns"
    )
    show.add_argument("--step", type=int, help="show this step's samples")
    show.add_argument("--sample", type=int, help="show this sample in full, token by token")
    verify = _command(
        commands, "verify", "check every digest; names file, step, sample and column of damage"
    )
    verify.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="also report responses whose text encodes to other tokens",
    )
    _steps(verify)
    export = _command(commands, "export", "write samples for other tools")
    export.add_argument("--format", choices=("parquet", "arrow", "jsonl", "slime"), required=True)
    export.add_argument(
        "--output", required=True, metavar="PATH", help="file to write; for slime a directory"
    )
    _steps(export)
    diff = _command(commands, "diff", "compare two buffers sample by sample, bit by bit")
    diff.add_argument("other", help="run or buffer directory to compare with")
    diff.add_argument(
        "--limit", type=int, default=20, help="differences printed (default 20; all are counted)"
    )
    _steps(diff)
    drop = _command(
        commands, "drop", "remove a step and all later ones; the run generates them again"
    )
    drop.add_argument("--from-step", type=int, required=True, help="first step to remove")
    drop.add_argument("--yes", action="store_true", help="do it; without, only say what would go")
    repair = _command(
        commands, "repair", "rebuild lost commits, move damaged ones aside, sweep leftovers"
    )
    repair.add_argument(
        "--yes", action="store_true", help="do it; without, only say what would be done"
    )


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("path", help="run directory or its buffer directory")
    parser.add_argument("--json", action="store_true", help="machine-readable output on stdout")
    parser.set_defaults(handler=f"{_IMPL}:{name}")
    return parser


def _steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first-step", type=int, default=0, help="first step (default 0)")
    parser.add_argument("--last-step", type=int, help="last step, included (default: the newest)")

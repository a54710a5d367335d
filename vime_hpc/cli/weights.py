"""`vime-hpc weights`: look into weight versions on disk, check, compare, apply and export them. Parsing only."""

from __future__ import annotations

import argparse

_IMPL = "vime_hpc.cli.weights_commands"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `weights` command and its own subcommands."""
    parser = subparsers.add_parser(
        "weights",
        help="list, verify, compare, apply and export weight versions",
        description="Weight versions (RUN/weights/v000003), Hugging Face directories and checkpoints; needs no GPU and no torch.",
    )
    commands = parser.add_subparsers(dest="weights_command", metavar="COMMAND", required=True)
    ls = _command(commands, "ls", "versions of a run: kind, bytes, base and root digest")
    ls.add_argument("path", help="run directory, RUN/weights, or one version directory")
    verify = _command(commands, "verify", "check every digest; names file and tensor of damage")
    verify.add_argument(
        "path", help="run directory (all versions), a version, Hugging Face or checkpoint directory"
    )
    verify.add_argument(
        "--engines",
        action="store_true",
        help="of a running job: have its engines' own memory compared bit for bit after the next publish (GPU)",
    )
    verify.add_argument(
        "--wait",
        type=float,
        default=600.0,
        metavar="S",
        help="with --engines: longest wait (600 s)",
    )
    diff = _command(
        commands, "diff", "compare two sets of weights tensor by tensor (exit code 1: they differ)"
    )
    diff.add_argument("left", metavar="A", help="version, Hugging Face or checkpoint directory")
    diff.add_argument("right", metavar="B", help="another one")
    diff.add_argument("--limit", type=int, default=20, help="tensors printed (default 20)")
    apply = _command(commands, "apply", "write a base with a delta's changes as a full version")
    apply.add_argument("base", metavar="BASE", help="version or Hugging Face directory")
    apply.add_argument("delta", metavar="DELTA", help="version directory of kind delta")
    apply.add_argument("out", metavar="OUT", help="directory to write; must not exist")
    export = _command(commands, "export", "write a version as a Hugging Face directory")
    export.add_argument("version", metavar="VERSION", help="version directory")
    export.add_argument("out", metavar="OUT", help="directory to write; must not exist")
    export.add_argument(
        "--model",
        metavar="DIR",
        help="where config.json and the tokenizer come from (default: the run's model.path)",
    )


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="machine-readable output on stdout")
    parser.set_defaults(handler=f"{_IMPL}:{name}")
    return parser

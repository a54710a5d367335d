"""`vime-hpc bench rollout | buffer | submit`: speed as ratios against a reference of the same run; `compare` two records."""

from __future__ import annotations

from typing import Any

from vime_hpc.cli.numbers import positive_int

HANDLERS = "vime_hpc.cli.bench_command"


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="speed of a part as a ratio against a reference of the same run; compare two records",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for add in (_rollout, _buffer, _weights, _submit, _compare):
        add(actions)


def _rollout(actions: Any) -> None:
    parser = actions.add_parser(
        "rollout", help="our rollout path against the same vLLM called in process"
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="Hugging Face directory of the policy"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--num-prompts", type=positive_int, default=256, metavar="N")
    parser.add_argument("--prompt-tokens", type=positive_int, default=32, metavar="N")
    parser.add_argument(
        "--max-tokens", type=positive_int, default=64, metavar="N", help="length of every response"
    )
    parser.add_argument("--repeats", type=positive_int, default=3, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=f"{HANDLERS}:rollout")


def _buffer(actions: Any) -> None:
    parser = actions.add_parser(
        "buffer", help="the rollout buffer against the raw disk and other formats"
    )
    parser.add_argument(
        "--work", required=True, metavar="DIR", help="directory on the file system to measure"
    )
    parser.add_argument("--megabytes", type=positive_int, default=128, metavar="N")
    parser.add_argument("--repeats", type=positive_int, default=5, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=f"{HANDLERS}:buffer")


def _weights(actions: Any) -> None:
    parser = actions.add_parser(
        "weights", help="transports of weights against copies of the same bytes"
    )
    parser.add_argument(
        "--work", required=True, metavar="DIR", help="directory on the file system to measure"
    )
    parser.add_argument("--megabytes", type=positive_int, default=256, metavar="N")
    parser.add_argument("--repeats", type=positive_int, default=5, metavar="N")
    parser.add_argument(
        "--engine",
        metavar="MODEL",
        help="also publish to a real vLLM with this Hugging Face directory: its stall by phase",
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor parallel size of that engine"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=f"{HANDLERS}:weights")


def _submit(actions: Any) -> None:
    parser = actions.add_parser(
        "submit",
        help="submit to first step through our launcher against a bare srun, and after a restart",
        description="Submits short jobs of the cluster file's layout. Overrides: --section.option=value.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cluster", required=True, metavar="FILE", help="configs/clusters/NAME.toml (or NAME)"
    )
    parser.add_argument(
        "--work", required=True, metavar="DIR", help="fresh directory that compute nodes see"
    )
    parser.add_argument(
        "--imports",
        default="-",
        metavar="MODULES",
        help="modules every rank imports first, as torch,vllm (default: none)",
    )
    parser.add_argument("--repeats", type=positive_int, default=3, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler="vime_hpc.cli.bench_submit_command:main", takes_overrides=True)


def _compare(actions: Any) -> None:
    parser = actions.add_parser(
        "compare",
        help="what differs between two records, and by how much",
        description="A record is a run directory, a directory of run directories (repeats), or a file with the output "
        "of another bench command's --json.",
    )
    parser.add_argument("a", metavar="A", help="the reference")
    parser.add_argument("b", metavar="B", help="what is compared with it")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler="vime_hpc.cli.bench_compare_command:main")

"""`vime-hpc data make | model | check`: prompts, a tiny policy, and a look at both before anything
is trained.
"""

from __future__ import annotations

from typing import Any

HANDLERS = "vime_hpc.cli.data_commands"


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "data", help="make prompts and a tiny policy; check a prompt file"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _make(actions)
    _model(actions)
    _check(actions)
    _demonstrate(actions)


def _make(actions: Any) -> None:
    parser = actions.add_parser(
        "make",
        help="write prompts of a reasoning-gym task, training and held-out ones apart",
        description="Write DIR/train.jsonl and DIR/eval.jsonl. No prompt text occurs twice, so none of the held-out "
        "prompts is ever trained on.",
    )
    parser.add_argument(
        "--task",
        default="arithmetic",
        help="arithmetic (sums of two numbers), or any reasoning-gym data set",
    )
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--num-train", type=int, default=2000, metavar="N")
    parser.add_argument("--num-eval", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--task-option",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="option of the task, repeatable: --task-option min_terms=2 --task-option max_digits=1",
    )
    parser.add_argument(
        "--prompt-format",
        default="{question}",
        metavar="TEXT",
        help='prompt text; {question}, {answer} and fields of the entry\'s metadata may stand in it: "{expression}="',
    )
    parser.add_argument("--strip-spaces", action="store_true", help="write prompts without spaces")
    parser.add_argument("--force", action="store_true", help="overwrite other prompts in DIR")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=f"{HANDLERS}:make")


def _model(actions: Any) -> None:
    parser = actions.add_parser(
        "model",
        help="write a tiny Qwen3 policy with a byte-level tokenizer, in Hugging Face form",
        description="Write a Qwen3 (or, with --experts, Qwen3-MoE) policy with random weights to DIR.",
    )
    parser.add_argument("--out", required=True, metavar="DIR")
    for name, default, meaning in (
        ("hidden", 128, "hidden size, a multiple of 32"),
        ("layers", 4, "transformer layers"),
        ("heads", 4, "attention heads"),
        ("kv-heads", 2, "key-value heads"),
        ("head-dim", 32, "size of an attention head"),
        ("intermediate", 384, "size of the MLP (of each expert), a multiple of 32"),
        ("max-position", 2048, "longest sequence"),
        ("experts", 0, "experts per layer; 0 = dense"),
        ("experts-per-token", 2, "experts a token is routed to"),
        ("vocab-multiple", 32, "pad the vocabulary to a multiple of this"),
        ("seed", 1, "of the weights"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} ({default})"
        )
    parser.add_argument(
        "--rope-theta",
        type=float,
        default=10_000.0,
        metavar="X",
        help="base of the rotary embedding (10000)",
    )
    parser.add_argument(
        "--initializer-range",
        type=float,
        default=0.02,
        metavar="X",
        help="deviation of the weights (0.02)",
    )
    parser.add_argument(
        "--tie-embeddings", action="store_true", help="one matrix for input and output embeddings"
    )
    parser.add_argument("--force", action="store_true", help="overwrite another policy in DIR")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=f"{HANDLERS}:model")


def _check(actions: Any) -> None:
    parser = actions.add_parser(
        "check",
        help="read a prompt file as a run would, and grade its own labels",
        description="Count, tokenize and look for what makes runs fail in silence: bad lines, doubled BOS, duplicates, too "
        "long prompts, labels the verifier does not give full marks. Exit code 3 where something is wrong.",
    )
    parser.add_argument("file", metavar="FILE", help="JSONL or Parquet")
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="directory with the tokenizer"
    )
    parser.add_argument(
        "--reward", "--rm-type", default="", metavar="NAME", help="verifier that grades the labels"
    )
    parser.add_argument(
        "--reward-table",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="option of the verifier",
    )
    parser.add_argument("--reward-key", default="", metavar="KEY", help="entry of a dict reward")
    parser.add_argument("--prompt-key", default="prompt")
    parser.add_argument("--label-key", default="label")
    parser.add_argument("--no-chat-template", action="store_true", help="prompts are plain text")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, metavar="N")
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="count bad lines instead of refusing the file"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=f"{HANDLERS}:check")


def _demonstrate(actions: Any) -> None:
    parser = actions.add_parser(
        "demonstrate",
        help="write a warm-up file: the labels of a prompt file in several styles",
        description="Write OUT with COPIES records per prompt of PROMPTS, the label of each in a style drawn by weight. "
        'A supervised run on it (algorithm.loss = "sft") makes a policy that knows the task and has several ways to '
        "put the answer.",
    )
    parser.add_argument("prompts", metavar="PROMPTS", help="prompt file with labels")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="records per prompt (1)")
    parser.add_argument(
        "--style",
        action="append",
        required=True,
        metavar="PATTERN=WEIGHT",
        help="repeatable; {answer} stands for the label: --style '{answer}=0.4' --style '{answer}.=0.6'",
    )
    parser.add_argument("--label-key", default="label", metavar="KEY")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler="vime_hpc.cli.demonstrations_command:demonstrate")

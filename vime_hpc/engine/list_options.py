"""`python -m vime_hpc.engine.list_options`: the installed vLLM server's options as one line of JSON."""

from __future__ import annotations

import sys

from vime_hpc.engine.passthrough import as_json, describe


def main() -> None:
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before 0.12
        from vllm.utils import FlexibleArgumentParser
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # 0.30
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # 0.26
    sys.stdout.write("\n" + as_json(describe(make_arg_parser(FlexibleArgumentParser()))) + "\n")


if __name__ == "__main__":
    main()

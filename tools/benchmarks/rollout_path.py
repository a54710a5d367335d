"""Tokens a second through the rollout path (server, token, HTTP, client) or from vLLM called in process, same requests.

    python tools/benchmarks/rollout_path.py --way server --in-flight 256 1024
    python tools/benchmarks/rollout_path.py --way direct --in-flight 256 1024

Every response has exactly --max-tokens tokens, a seed of its own and its logprobs. One line of JSON a case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from alone import alone
from trainer_step import DIMS, VOCABULARY, write_model

VLLM = {"gpu-memory-utilization": 0.1, "kv-cache-memory-bytes": 22 << 30, "max-num-seqs": 1024}
Run = Callable[[list[list[int]], int], int]
"""(prompts, first seed) -> response tokens made."""


def measure(options: argparse.Namespace, run: Run) -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(
        1000, VOCABULARY, (max(options.in_flight), options.prompt_tokens)
    ).tolist()
    with alone():
        for count in options.in_flight:
            rates = []
            for repetition in range(options.repeats + 1):
                start = time.perf_counter()
                tokens = run(prompts[:count], 10_000 * repetition)
                rates.append(tokens / (time.perf_counter() - start))
            print(
                json.dumps(
                    {
                        "way": options.way,
                        "in_flight": count,
                        "max_tokens": options.max_tokens,
                        "tokens_per_s": [round(rate) for rate in rates[1:]],
                    }
                ),
                flush=True,
            )


def direct(options: argparse.Namespace, model: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        seed=0,
        max_model_len=options.prompt_tokens + options.max_tokens,
        logprobs_mode="processed_logprobs",
        **{name.replace("-", "_"): value for name, value in VLLM.items()},
    )

    def run(prompts: list[list[int]], seed: int) -> int:
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=options.max_tokens,
                ignore_eos=True,
                logprobs=0,
                seed=seed + i,
            )
            for i in range(len(prompts))
        ]
        outputs = llm.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    measure(options, run)


def server(options: argparse.Namespace, model: Path) -> None:
    from vime_hpc.config.model import ModelConfig
    from vime_hpc.config.parts import EngineConfig
    from vime_hpc.engine.client import EngineHTTPClient
    from vime_hpc.engine.server import EngineServer
    from vime_hpc.engine.tokens import new_token_file, read_token

    with tempfile.TemporaryDirectory() as folder:
        token = new_token_file(Path(folder) / "token")
        engine = EngineServer(
            EngineConfig(device="cuda"),
            ModelConfig(path=str(model), dtype="bfloat16"),
            vllm=VLLM,
            seed=0,
            index=0,
            max_model_len=options.prompt_tokens + options.max_tokens,
            host="127.0.0.1",
            token_file=token,
            log_path=Path(folder) / "engine.log",
        )

        async def ask(prompts: list[list[int]], seed: int) -> int:
            async with EngineHTTPClient(
                [engine.url],
                read_token(token),
                concurrency=len(prompts),
                extra={"ignore_eos": True},
            ) as client:
                answers = await asyncio.gather(
                    *(
                        client.sample(
                            prompt_tokens=prompt, seed=seed + i, max_tokens=options.max_tokens
                        )
                        for i, prompt in enumerate(prompts)
                    )
                )
            return sum(len(answer.tokens) for answer in answers)

        with engine:
            engine.start()
            engine.wait_ready(300)
            measure(options, lambda prompts, seed: asyncio.run(ask(prompts, seed)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=("server", "direct"), required=True)
    parser.add_argument("--dims", choices=DIMS, default="0.6b")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--model", default=tempfile.gettempdir())
    options = parser.parse_args()
    model = write_model(Path(options.model) / f"bench-{options.dims}", options.dims)
    {"server": server, "direct": direct}[options.way](options, model)


if __name__ == "__main__":
    main()

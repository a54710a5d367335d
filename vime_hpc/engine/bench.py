"""`vime-hpc bench rollout`: tokens per second through our path (server, token, HTTP, client) ÷ the same vLLM in process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import EngineConfig
from vime_hpc.engine.client import EngineHTTPClient
from vime_hpc.engine.server import EngineServer, resolve_device
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.errors import EngineError

ON_A_CPU = {"max-num-seqs": 64, "block-size": 32, "enforce-eager": True}
ON_A_GPU = {"max-num-seqs": 1024, "gpu-memory-utilization": 0.4}
START_S = 300.0


def bench_rollout(
    model: ModelConfig, prompts: list[list[int]], *, max_tokens: int, repeats: int = 3
) -> dict[str, Any]:
    """Both ways on the same prompts, seeds and limits; every response has exactly max_tokens tokens.

    Args:
        model: the [model] section.
        prompts: token ids, one response each.
    Returns:
        tokens per second of both (best repetition) and their ratio.
    """
    job = {
        "model": model.path,
        "dtype": model.dtype,
        "max_model_len": max(map(len, prompts)) + max_tokens,
        "vllm": ON_A_CPU if resolve_device("auto") == "cpu" else ON_A_GPU,
        "prompts": prompts,
        "seeds": [1000 * i for i in range(len(prompts))],
        "max_tokens": max_tokens,
        "repeats": repeats,
    }
    direct = _direct(job)
    ours = _through_the_server(model, job)
    best = [max(f["tokens"] / f["seconds"] for f in figures) for figures in (ours, direct)]
    return {
        "requests": len(prompts),
        "max_tokens": max_tokens,
        "ours_tokens_per_s": best[0],
        "direct_tokens_per_s": best[1],
        "ratio": best[0] / best[1],
        "overhead_ms_per_request": 1e3 * max_tokens * (1 / best[0] - 1 / best[1]),
    }


def _direct(job: dict[str, Any]) -> list[dict[str, float]]:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if resolve_device("auto") == "cpu":
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    done = subprocess.run(
        [sys.executable, "-m", "vime_hpc.engine.bench_direct"],
        input=json.dumps(job),
        text=True,
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise EngineError(
            f"vLLM in process ended with code {done.returncode}:\n{done.stderr[-2000:]}"
        )
    figures: list[dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _through_the_server(model: ModelConfig, job: dict[str, Any]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        token_file = new_token_file(Path(folder) / "token")
        server = EngineServer(
            EngineConfig(),
            model,
            vllm=job["vllm"],
            seed=0,
            index=0,
            max_model_len=job["max_model_len"],
            host="127.0.0.1",
            token_file=token_file,
            log_path=Path(folder) / "vllm.log",
        )
        server.start()
        try:
            server.wait_ready(START_S)
            return asyncio.run(_ask(server.url, read_token(token_file), job))
        finally:
            server.stop()


async def _ask(url: str, token: str, job: dict[str, Any]) -> list[dict[str, float]]:
    figures = []
    async with EngineHTTPClient(
        [url], token, concurrency=len(job["prompts"]), extra={"ignore_eos": True}
    ) as client:
        for repetition in range(job["repeats"] + 1):
            began = time.perf_counter()
            answers = await asyncio.gather(
                *(
                    client.sample(
                        prompt_tokens=prompt, seed=seed + repetition, max_tokens=job["max_tokens"]
                    )
                    for prompt, seed in zip(job["prompts"], job["seeds"], strict=True)
                )
            )
            seconds = time.perf_counter() - began
            figures.append(
                {"tokens": float(sum(len(a.tokens) for a in answers)), "seconds": seconds}
            )
    return figures[1:]

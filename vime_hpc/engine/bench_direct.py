"""`python -m vime_hpc.engine.bench_direct`: the reference of `vime-hpc bench rollout`, vLLM called in process.

Reads one JSON object from standard input (model, dtype, max_model_len, vllm, prompts, seeds, max_tokens) and writes one with tokens and seconds of every repetition.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    options = {name.replace("-", "_"): value for name, value in job["vllm"].items()}
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        seed=0,
        logprobs_mode="processed_logprobs",
        **options,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    figures = []
    for repetition in range(job["repeats"] + 1):
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=job["max_tokens"],
                logprobs=0,
                seed=seed + repetition,
                ignore_eos=True,
            )
            for seed in job["seeds"]
        ]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        figures.append(
            {"tokens": sum(len(o.outputs[0].token_ids) for o in outputs), "seconds": seconds}
        )
    print("\n" + json.dumps(figures[1:]), flush=True)  # the first repetition warms up


if __name__ == "__main__":
    main()

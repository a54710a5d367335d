"""Where the difference between the engine's and the trainer's logprobs comes from: the same tokens through both, one change at a time.

    python tools/benchmarks/logprob_difference.py --run RUN --out DIR [--prompts 256] [--samples 4]

RUN is a finished run: its newest prompts, its exported weights. The engine samples responses once; every other row computes the
logprobs of the same tokens. Each row is a process of its own. Prints one line of JSON a row: mean and largest absolute difference
to the trainer as configured (`to_trainer`) and to the trainer in float32 (`to_float32`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ENGINE_ROWS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    # name: (LLM options, environment)
    "engine, decoding (what a run records)": ({}, {}),
    "engine, the same tokens as one prompt": ({}, {}),
    "engine, no CUDA graphs or compiling": ({"enforce_eager": True}, {}),
    "engine, batch-invariant kernels": ({}, {"VLLM_BATCH_INVARIANT": "1"}),
    "engine, float32": ({"dtype": "float32"}, {}),
}
TRAINER_ROWS: dict[str, dict[str, str]] = {
    "trainer": {"dtype": "bfloat16"},
    "trainer, one SDPA per sample": {"dtype": "bfloat16", "attention": "sdpa"},
    "trainer, float32": {"dtype": "float32", "attention": "sdpa"},
}
DECODING = next(iter(ENGINE_ROWS))


def engine_row(job: dict[str, Any]) -> list[list[float]]:
    """Logprobs of the responses by vLLM in this process; the decoding row samples the responses first."""
    from vllm import LLM, SamplingParams

    options, _ = ENGINE_ROWS[job["row"]]
    llm = LLM(
        **{
            "model": job["model"],
            "dtype": "bfloat16",
            "seed": 0,
            "max_model_len": job["length"],
            "logprobs_mode": "processed_logprobs",
            **job["llm"],
            **options,
        }
    )
    if job["row"] == DECODING:
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in job["prompts"]],
            [
                SamplingParams(temperature=1.0, max_tokens=job["max_tokens"], logprobs=0, seed=i)
                for i in range(len(job["prompts"]))
            ],
            use_tqdm=False,
        )
        answers = [o.outputs[0] for o in outputs]
        job["responses"] = [list(a.token_ids) for a in answers]
        return [
            [entry[token].logprob for entry, token in zip(a.logprobs, a.token_ids, strict=True)]
            for a in answers
        ]
    whole = [p + r for p, r in zip(job["prompts"], job["responses"], strict=True)]
    outputs = llm.generate(
        [{"prompt_token_ids": tokens} for tokens in whole],
        SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    return [
        [o.prompt_logprobs[i][tokens[i]].logprob for i in range(len(prompt), len(tokens))]
        for o, tokens, prompt in zip(outputs, whole, job["prompts"], strict=True)
    ]


def trainer_row(job: dict[str, Any]) -> list[list[float]]:
    """Logprobs of the responses by the trainer, one rank."""
    import torch
    import torch.distributed as dist

    from vime_hpc.trainer import cuda_on_cpu

    cuda_on_cpu.install()
    from vime_hpc.config.algorithm import AlgorithmConfig, OptimizerConfig
    from vime_hpc.config.model import ModelConfig
    from vime_hpc.config.parts import TrainerConfig
    from vime_hpc.trainer.model import build_model
    from vime_hpc.trainer.step import MegatronTrainer

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = Path(tempfile.mkdtemp()) / "store"  # further groups are made through it
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    parts = TrainerConfig(max_tokens_per_microbatch=8192)
    trainer = MegatronTrainer(
        build_model(ModelConfig(path=job["model"], **TRAINER_ROWS[job["row"]]), parts),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(),
        trainer=parts,
        temperature=1.0,
        num_steps=1,
    )
    return [row.tolist() for row in trainer.logprobs(_samples(job))]


def _samples(job: dict[str, Any]) -> list[Any]:
    from vime_hpc.types import Sample, Status, rollout_id_of, sample_id_of

    return [
        Sample(
            sample_id=sample_id_of(rollout_id_of(i, 0)),
            group_id=i,
            rollout_id=rollout_id_of(i, 0),
            prompt_id=0,
            index_in_group=0,
            tokens=np.asarray(prompt + response, np.int32),
            response_length=len(response),
            loss_mask=np.ones(len(response), np.uint8),
            rollout_logprobs=np.zeros(len(response), np.float32),
            status=Status.COMPLETED,
            reward=0.0,
        )
        for i, (prompt, response) in enumerate(zip(job["prompts"], job["responses"], strict=True))
    ]


def prompts_of(run: Path, count: int) -> list[list[int]]:
    """Token ids of the newest `count` prompts of a run, one a group."""
    from vime_hpc.buffer.store import RolloutBuffer

    found: dict[int, list[int]] = {}
    for _, sample in RolloutBuffer.open(run).samples():
        found[sample.group_id] = sample.tokens[
            : len(sample.tokens) - sample.response_length
        ].tolist()
    return list(found.values())[-count:]


def run_row(job: dict[str, Any], row: str, folder: Path) -> np.ndarray | None:
    """Compute one row in a process of its own; None, said on standard error, where it cannot be had."""
    path = folder / f"{row.replace(' ', '-')}.json"
    path.write_text(json.dumps({**job, "row": row}))
    env = {**os.environ, **ENGINE_ROWS.get(row, ({}, {}))[1]}
    with (folder / f"{row.replace(' ', '-')}.log").open("w") as log:
        code = subprocess.run(
            [sys.executable, __file__, "--row", str(path)], env=env, stdout=log, stderr=log
        ).returncode
    if code:
        print(f"{row}: not to be had here (code {code}), see {log.name}", file=sys.stderr)
        return None
    done = json.loads(path.read_text())
    job["responses"] = done["responses"]
    return np.concatenate([np.asarray(r) for r in done["logprobs"]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--llm", default="{}", help="JSON of further options of vLLM")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        job = json.loads(options.row.read_text())
        job["logprobs"] = (trainer_row if job["row"] in TRAINER_ROWS else engine_row)(job)
        options.row.write_text(json.dumps(job))
        sys.stdout.flush()
        os._exit(
            0
        )  # the figures are written: what libraries' destructors say at the end of a process is no result
    options.out.mkdir(parents=True, exist_ok=True)
    prompts = prompts_of(options.run, options.prompts) * options.samples
    job = {
        "model": str(options.run / "export"),
        "prompts": prompts,
        "max_tokens": options.max_tokens,
        "length": max(map(len, prompts)) + options.max_tokens + 1,
        "llm": json.loads(options.llm),
    }
    rows = {DECODING: run_row(job, DECODING, options.out)}
    others = [name for name in (*ENGINE_ROWS, *TRAINER_ROWS) if name != DECODING]
    with ThreadPoolExecutor(len(others)) as pool:  # nothing is timed
        found = pool.map(lambda name: run_row(job, name, options.out), others)
        rows |= dict(zip(others, found, strict=True))
    for name, row in rows.items():
        if row is not None:
            line: dict[str, Any] = {"row": name, "tokens": len(row)}
            for key, other in (("to_trainer", "trainer"), ("to_float32", "trainer, float32")):
                difference = np.abs(row - rows[other])
                line[key] = {"mean": float(difference.mean()), "largest": float(difference.max())}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

"""Tokens a second, TFLOP/s and memory of the trainer's step on one GPU, beside the device's own matrix rate.

    python tools/benchmarks/trainer_step.py --dims 0.6b --tokens 16384 --sample 2048 --steps 8 [--set trainer.logit_chunk_tokens=4096]

Random weights and tokens. FLOP are 6 N T + attention's (causal), without the input embedding and without recomputation;
N counts the output layer. One line of JSON a case.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from alone import alone

DIMS = {  # hidden, intermediate, layers, heads, key/value heads
    "tiny": (256, 512, 4, 4, 2),
    "0.6b": (1024, 3072, 28, 16, 8),
    "4b": (2560, 9728, 36, 32, 8),
}
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
VOCABULARY, HEAD_DIM = 151_936, 128
COMMON = {
    "vocab_size": VOCABULARY,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 40_960,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
}  # of config.json, whatever the sizes


def sizes(dims: str) -> dict[str, int]:
    """The model's sizes under config.json's names."""
    return dict(zip(NAMES, DIMS[dims], strict=True))


def write_model(folder: Path, dims: str, *, tied: bool = False) -> Path:
    """config.json and random bfloat16 weights of a Qwen3 model, made on the GPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if (folder / "tokenizer.json").exists():
        return folder
    config = Qwen3Config(**sizes(dims), **COMMON, tie_word_embeddings=tied)
    torch.manual_seed(1)
    with torch.device("cuda"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM(config)
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    from vime_hpc.rollout.tiny_policy import byte_tokenizer

    byte_tokenizer().save_pretrained(str(folder))
    del model
    torch.cuda.empty_cache()
    return folder


def samples_of(num_tokens: int, length: int) -> list[Any]:
    """num_tokens in samples of `length`, all but 64 tokens of each trained on, two groups' worth of rewards."""
    from vime_hpc.types import Sample, Status, rollout_id_of, sample_id_of

    rng = np.random.default_rng(0)
    made = []
    for i in range(num_tokens // length):
        response = length - 64
        rollout = rollout_id_of(i // 4, i % 4)
        made.append(
            Sample(
                sample_id=sample_id_of(rollout),
                group_id=i // 4,
                rollout_id=rollout,
                prompt_id=0,
                index_in_group=i % 4,
                tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
                response_length=response,
                loss_mask=np.ones(response, np.uint8),
                rollout_logprobs=np.full(response, -11.9, np.float32),
                status=Status.COMPLETED,
                reward=float(i % 2),
            )
        )
    return made


def batch_of(samples: list[Any]) -> Any:
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed" / "trainer"))
    from trainer_cases import MemoryBatch

    return MemoryBatch(samples)


def matrix_rate() -> float:
    """bf16 TFLOP/s of an 8192^3 product of random numbers, now."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        a @ b
    end.record()
    end.synchronize()
    return 20 * 2 * 8192**3 / start.elapsed_time(end) / 1e9


def flop_of_step(dims: str, num_tokens: int, length: int) -> float:
    d = sizes(dims)
    h, i, layers = d["hidden_size"], d["intermediate_size"], d["num_hidden_layers"]
    q, kv = d["num_attention_heads"] * HEAD_DIM, d["num_key_value_heads"] * HEAD_DIM
    weights = layers * (h * (q + 2 * kv) + q * h + 3 * h * i) + h * VOCABULARY
    attention = (
        layers * 2 * q * length
    )  # two products of q * length / 2 each (causal), 2 FLOP an entry
    return num_tokens * (6.0 * weights + 3 * attention)


def measure(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from vime_hpc.config.algorithm import AlgorithmConfig, OptimizerConfig
    from vime_hpc.config.model import ModelConfig
    from vime_hpc.config.parts import TrainerConfig
    from vime_hpc.trainer.model import build_model
    from vime_hpc.trainer.step import MegatronTrainer

    folder = write_model(
        Path(options.model or tempfile.gettempdir()) / f"bench-{options.dims}", options.dims
    )
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{store}/store", rank=0, world_size=1
        )
        parts = TrainerConfig(
            **{"max_tokens_per_microbatch": options.tokens, **json.loads(options.trainer)}
        )
        torch.cuda.reset_peak_memory_stats()
        trainer = MegatronTrainer(
            build_model(
                ModelConfig(path=str(folder), dtype="bfloat16", attention=options.attention), parts
            ),
            algorithm=AlgorithmConfig(),
            optimizer=OptimizerConfig(lr=1e-6),
            trainer=parts,
            temperature=1.0,
            num_steps=1000,
        )
        batch = batch_of(samples_of(options.tokens * options.microbatches, options.sample))
        with alone():
            for _ in range(3):
                trainer.step(batch)
            torch.cuda.synchronize()
            times = []
            for _ in range(options.steps):
                start = time.perf_counter()
                trainer.step(batch)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            peak = torch.cuda.max_memory_allocated()
            if options.profile:
                profile(trainer, batch, options.profile)
            rate = matrix_rate()
        tokens = options.tokens * options.microbatches
        best = sorted(times)[len(times) // 2]
        tflops = flop_of_step(options.dims, tokens, options.sample) / best / 1e12
        print(
            json.dumps(
                {
                    "case": options.name,
                    "dims": options.dims,
                    "tokens": tokens,
                    "sample": options.sample,
                    "median_s": round(best, 4),
                    "fastest_s": round(min(times), 4),
                    "slowest_s": round(max(times), 4),
                    "tokens_per_s": round(tokens / best),
                    "tflops": round(tflops, 1),
                    "matrix_tflops": round(rate, 1),
                    "share_of_matrix_rate": round(tflops / rate, 3),
                    "peak_gib": round(peak / 2**30, 2),
                    "attention": options.attention,
                    "trainer": json.loads(options.trainer),
                }
            ),
            flush=True,
        )
        dist.destroy_process_group()


def profile(trainer: Any, batch: Any, where: str) -> None:
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        trainer.step(batch)
        torch.cuda.synchronize()
    text = prof.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70
    )
    text += prof.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=70
    )
    Path(where).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="")
    parser.add_argument("--dims", choices=DIMS, default="0.6b")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a microbatch")
    parser.add_argument("--sample", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--trainer", default="{}", help="JSON of [trainer] options")
    parser.add_argument("--model", default="", help="folder for the model (reused)")
    parser.add_argument("--profile", default="", help="write a kernel table here")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()

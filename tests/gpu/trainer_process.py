"""Runs one trainer in a process of its own, on the GPU or (CUDA_VISIBLE_DEVICES empty) on the CPU.

    python trainer_process.py '{"model": DIR, "out": DIR, "dtype": "float32", "steps": 3, ...}'

Writes OUT/result.json (metrics, memory after each step) and OUT/tensors.safetensors (weights, logprobs).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Outcome:
    """What one run left."""

    metrics: list[dict[str, float]]
    allocated: list[int]
    """Bytes allocated on the device after each step."""
    reserved: list[int]
    tensors: dict[str, Any]
    """weights and, as "logprobs/first" and "logprobs/last", the response tokens' logprobs."""


def start(out: Path, model: Path, *, gpu: bool, **options: Any) -> subprocess.Popen[str]:
    """Start a run; `outcome` waits for it."""
    out.mkdir(parents=True)
    root = str(HERE.parents[1])
    path = os.pathsep.join(
        [root, str(HERE.parent / "distributed" / "trainer"), os.environ.get("PYTHONPATH", "")]
    )
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "4",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if not gpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    options |= {"model": str(model), "out": str(out)}
    with (out / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE / "trainer_process.py"), json.dumps(options)],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def outcome(process: subprocess.Popen[str], out: Path, timeout_s: float = 240) -> Outcome:
    from safetensors.torch import load_file

    code = process.wait(timeout_s)
    assert code == 0, (out / "log").read_text()[-4000:]
    result = json.loads((out / "result.json").read_text())
    return Outcome(
        result["metrics"],
        result["allocated"],
        result["reserved"],
        load_file(out / "tensors.safetensors"),
    )


def main(options: dict[str, Any]) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    from vime_hpc.trainer import cuda_on_cpu

    cuda_on_cpu.install()
    from safetensors.torch import save_file
    from trainer_cases import MemoryBatch, make_samples

    from vime_hpc.config.algorithm import AlgorithmConfig, OptimizerConfig
    from vime_hpc.config.model import ModelConfig
    from vime_hpc.config.parts import TrainerConfig
    from vime_hpc.trainer.model import build_model
    from vime_hpc.trainer.step import MegatronTrainer

    on_gpu = torch.cuda.is_available()
    torch.use_deterministic_algorithms(bool(options.get("deterministic")))
    torch.set_num_threads(4)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"file://{store.name}.store",
            rank=0,
            world_size=1,
        )
    parts = TrainerConfig(
        max_tokens_per_microbatch=options.get("max_tokens", 100), logit_chunk_tokens=64
    )
    trainer = MegatronTrainer(
        build_model(
            ModelConfig(
                path=options["model"],
                dtype=options["dtype"],
                attention=options.get("attention", "auto"),
            ),
            parts,
        ),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(lr=options.get("lr", 1e-4)),
        trainer=parts,
        temperature=0.9,
        num_steps=options["steps"],
    )
    batches = [make_samples(seed=seed) for seed in range(options.get("batches", 3))]
    first = np.concatenate(trainer.logprobs(batches[0]))
    batches = [
        [replace(s, rollout_logprobs=lp) for s, lp in zip(b, trainer.logprobs(b), strict=True)]
        for b in batches
    ]
    metrics, allocated, reserved = [], [], []
    for step in range(options["steps"]):
        metrics.append(trainer.step(MemoryBatch(batches[step % len(batches)], step=step)))
        if on_gpu:
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
            reserved.append(torch.cuda.memory_reserved())
    last = np.concatenate(trainer.logprobs(batches[0]))
    tensors = {
        name: p.detach().float().cpu().clone()
        for name, p in trainer.model.module.named_parameters()
    }
    tensors |= {"logprobs/first": torch.from_numpy(first), "logprobs/last": torch.from_numpy(last)}
    out = Path(options["out"])
    save_file(tensors, out / "tensors.safetensors")
    (out / "result.json").write_text(
        json.dumps({"metrics": metrics, "allocated": allocated, "reserved": reserved})
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

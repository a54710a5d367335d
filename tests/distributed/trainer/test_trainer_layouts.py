"""Whatever the layout, training is what plain Hugging Face and torch compute: logprobs, losses,
norms, weights.

The oracle runs each sample alone through the transformers model, writes the loss out by hand and
steps torch's AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_cases import MemoryBatch, make_model, make_samples

from vime_hpc.config.algorithm import AlgorithmConfig, OptimizerConfig
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import TrainerConfig
from vime_hpc.testing.ranks import run_ranks
from vime_hpc.types import Sample

TEMPERATURE = 0.7
STEPS = 3
# eps far above the rounding noise of a gradient, so that Adam's first steps do not turn noise into
# full steps
OPTIMIZER = OptimizerConfig(
    lr=1e-2, eps=1e-3, weight_decay=0.05, warmup_updates=2, clip_grad_norm=1.0
)
LOSSES = {
    "policy": AlgorithmConfig(kl_loss_coef=0.05, entropy_coef=0.02),
    "sft": AlgorithmConfig(loss="sft", aggregation="token_mean"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"num_ranks": 2},
    "dp3": {"num_ranks": 3},
    "tp2": {"num_ranks": 2, "tp": 2},
    "tp2-sp": {"num_ranks": 2, "tp": 2, "sequence_parallel": True},
    "pp2": {"num_ranks": 2, "pp": 2},
    "dp2-distributed-optimizer": {"num_ranks": 2, "distributed_optimizer": True},
    "tp2-pp2": {"num_ranks": 4, "tp": 2, "pp": 2},
    "recompute": {"recompute": "full"},
    "pp2-recompute": {"num_ranks": 2, "pp": 2, "recompute": "full"},
    "recompute-attention": {"recompute": "selective"},
}
MOE_LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"num_ranks": 2},
    "ep2": {"num_ranks": 2, "ep": 2},
    "pp2": {"num_ranks": 2, "pp": 2},
    "tp2-sp": {"num_ranks": 2, "tp": 2, "sequence_parallel": True},
    "tp2-sp-ep2": {"num_ranks": 2, "tp": 2, "sequence_parallel": True, "ep": 2},
    "ep2-distributed-optimizer": {"num_ranks": 2, "ep": 2, "distributed_optimizer": True},
}


@dataclass
class Outcome:
    logprobs: list[np.ndarray]
    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": make_model(root / "qwen3", vocab=251),  # odd: TP2 pads the vocabulary
        "qwen3-tied": make_model(root / "tied", tied=True),
        "qwen3_moe": make_model(root / "moe", kind="qwen3_moe"),
        "qwen2": make_model(root / "qwen2", kind="qwen2"),
        "llama": make_model(root / "llama", kind="llama"),
    }


@pytest.fixture(scope="module")
def oracle(models: dict[str, Path]) -> Any:
    known: dict[tuple[str, str], Outcome] = {}

    def outcome(model: str, loss: str) -> Outcome:
        if (model, loss) not in known:
            known[model, loss] = hugging_face(models[model], LOSSES[loss])
        return known[model, loss]

    return outcome


def hf_logprobs(
    model: Any, sample: Sample, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    logits = model(tokens[None]).logits[0, -sample.response_length - 1 : -1].float() / temperature
    logp = torch.log_softmax(logits, -1)
    chosen = logp.gather(1, tokens[-sample.response_length :, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(-1)


def hand_written_loss(
    model: Any, reference: Any, samples: list[Sample], config: AlgorithmConfig
) -> torch.Tensor:
    sft = config.loss == "sft"
    trained = sum(int(s.loss_mask.sum()) for s in samples)
    total = torch.zeros(())
    for sample in samples:
        mask = torch.from_numpy(sample.loss_mask.astype(np.float32))
        logprobs, entropy = hf_logprobs(model, sample, 1.0 if sft else TEMPERATURE)
        if sft:
            total = total - (logprobs * mask).sum() / trained
            continue
        rewards = np.array([s.reward for s in samples if s.group_id == sample.group_id])
        advantage = (sample.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        ratio = (logprobs - logprobs.detach()).exp()  # on-policy: 1, with the gradient of logprobs
        ahead = hf_logprobs(reference, sample, TEMPERATURE)[0].detach() - logprobs
        kl = ahead.exp() - 1 - ahead
        per_token = -ratio * advantage - config.entropy_coef * entropy + config.kl_loss_coef * kl
        total = total + (per_token * mask).sum() / mask.sum() / len(samples)
    return total


def hugging_face(path: Path, config: AlgorithmConfig) -> Outcome:
    import transformers

    torch.set_num_threads(1)
    model, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for _ in range(2)
    )
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
        eps=OPTIMIZER.eps,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        weight_decay=OPTIMIZER.weight_decay,
    )
    temperature = 1.0 if config.loss == "sft" else TEMPERATURE
    outcome = Outcome(
        [hf_logprobs(model, s, temperature)[0].detach().numpy() for s in make_samples()], [], [], {}
    )
    for step in range(STEPS):
        for group in adam.param_groups:
            group["lr"] = OPTIMIZER.lr * min(1.0, (step + 1) / OPTIMIZER.warmup_updates)
        adam.zero_grad()
        loss = hand_written_loss(model, reference, make_samples(seed=step + 5), config)
        loss.backward()
        outcome.norms.append(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad_norm))
        )
        outcome.losses.append(loss.item())
        adam.step()
    outcome.weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    return outcome


def megatron(rank: int, path: Path, config: AlgorithmConfig, layout: dict[str, Any]) -> Outcome:
    from vime_hpc.trainer.export import WeightExporter
    from vime_hpc.trainer.model import build_model
    from vime_hpc.trainer.step import MegatronTrainer

    parts = TrainerConfig(max_tokens_per_microbatch=60, logit_chunk_tokens=7, **layout)
    model = ModelConfig(path=str(path), dtype="float32")
    built = build_model(model, parts)
    reference = build_model(model, parts, frozen=True) if config.kl_loss_coef else None
    trainer = MegatronTrainer(
        built,
        algorithm=config,
        optimizer=OPTIMIZER,
        trainer=parts,
        temperature=TEMPERATURE,
        num_steps=STEPS,
        reference=reference,
    )
    outcome = Outcome(trainer.logprobs(make_samples()), [], [], {})
    for step in range(STEPS):
        metrics = trainer.step(MemoryBatch(make_samples(seed=step + 5), step=step))
        outcome.losses.append(metrics["train/loss"])
        outcome.norms.append(metrics["train/grad_norm"])
    outcome.weights = {name: tensor.numpy() for name, tensor in WeightExporter(built).tensors()}
    return outcome


def check(path: Path, expected: Outcome, config: AlgorithmConfig, layout: dict[str, Any]) -> None:
    ranks = run_ranks(megatron, layout.get("num_ranks", 1), path, config, layout, megatron=True)
    weights = {name: value for rank in ranks for name, value in rank.weights.items()}
    for got in ranks:  # every rank reports the same
        for a, b in zip(got.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)
        assert got.losses == pytest.approx(expected.losses, abs=2e-5)
        assert got.norms == pytest.approx(expected.norms, rel=2e-4)
    named = split_experts(expected.weights)
    assert weights.keys() == named.keys() - (
        {"lm_head.weight"} if "lm_head.weight" not in weights else set()
    )
    for name, value in weights.items():
        assert np.abs(value - named[name]).max() < 3e-5, name


def split_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """transformers 5 holds all experts of a layer in one tensor; its files, and we, one tensor an
    expert.
    """
    result = {}
    for name, value in weights.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, part in enumerate(value):
                (
                    result[f"{prefix}.{expert}.gate_proj.weight"],
                    result[f"{prefix}.{expert}.up_proj.weight"],
                ) = np.split(part, 2)
        elif last == "down_proj" and prefix.endswith("experts"):
            result |= {
                f"{prefix}.{expert}.down_proj.weight": part for expert, part in enumerate(value)
            }
        else:
            result[name] = value
    return result


@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        *(("policy", layout) for layout in LAYOUTS),
        *(("sft", layout) for layout in ("one", "dp2", "tp2", "pp2")),
    ],
)
def test_dense_training_equals_hugging_face_in_every_layout(
    layout: str, loss: str, models: dict[str, Path], oracle: Any
) -> None:
    check(models["qwen3"], oracle("qwen3", loss), LOSSES[loss], LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_tied_embeddings_get_both_gradients_in_every_layout(
    layout: str, models: dict[str, Path], oracle: Any
) -> None:
    check(models["qwen3-tied"], oracle("qwen3-tied", "policy"), LOSSES["policy"], LAYOUTS[layout])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_other_families_train_like_hugging_face(
    family: str, layout: str, models: dict[str, Path], oracle: Any
) -> None:
    check(models[family], oracle(family, "sft"), LOSSES["sft"], LAYOUTS[layout])


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_moe_training_equals_hugging_face_in_every_layout(
    layout: str, models: dict[str, Path], oracle: Any
) -> None:
    check(models["qwen3_moe"], oracle("qwen3_moe", "sft"), LOSSES["sft"], MOE_LAYOUTS[layout])


def test_the_yardstick_is_not_blunt(models: dict[str, Path], oracle: Any) -> None:
    """Three steps move weights, losses and KL by orders of magnitude more than the tolerances
    above.
    """
    from safetensors.numpy import load_file

    start, end = load_file(models["qwen3"] / "model.safetensors"), oracle("qwen3", "policy")
    moved = [np.abs(start[name] - end.weights[name]).max() for name in start]
    assert min(moved) > 1e-3
    assert max(moved) > 1e-2
    assert abs(oracle("qwen3", "sft").losses[0] - oracle("qwen3", "sft").losses[-1]) > 0.1

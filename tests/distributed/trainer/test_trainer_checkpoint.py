"""A resumed run is the uninterrupted one; only whole checkpoints are read; other layouts read them
too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_cases import MemoryBatch, make_model, make_samples

from vime_hpc.config.algorithm import AlgorithmConfig, OptimizerConfig
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import CheckpointConfig, TrainerConfig
from vime_hpc.testing.ranks import RankFailed, run_ranks

Result = tuple[int, list[tuple[float, ...]], dict[str, np.ndarray]]
ONE, DP2, TP2, PP2 = {}, {"num_ranks": 2}, {"num_ranks": 2, "tp": 2}, {"num_ranks": 2, "pp": 2}
SHARDED = {"num_ranks": 2, "distributed_optimizer": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", num_hidden_layers=2, vocab=251)


def train(
    rank: int,
    path: Path,
    root: Path,
    layout: dict[str, Any],
    steps: int,
    dtype: str = "float32",
    interval: int = 2,
    keep: int = 2,
    equal_until: int = 0,
    **algorithm: Any,
) -> Result:
    from vime_hpc.trainer.checkpoint import MegatronCheckpoints
    from vime_hpc.trainer.export import WeightExporter
    from vime_hpc.trainer.model import build_model
    from vime_hpc.trainer.step import MegatronTrainer

    torch.manual_seed(
        100 + rank
    )  # ranks draw different numbers, so that one state given to all would show
    parts = TrainerConfig(max_tokens_per_microbatch=60, **layout)
    model = ModelConfig(path=str(path), dtype=dtype)  # type: ignore[arg-type]
    config = AlgorithmConfig(entropy_coef=0.01, **algorithm)
    reference = build_model(model, parts, frozen=True) if config.kl_loss_coef else None
    trainer = MegatronTrainer(
        build_model(model, parts),
        algorithm=config,
        trainer=parts,
        temperature=1.0,
        num_steps=8,
        reference=reference,
        optimizer=OptimizerConfig(
            lr=1e-2, min_lr=1e-4, warmup_updates=2, decay="cosine", weight_decay=0.1
        ),
    )
    keeper = MegatronCheckpoints(
        root, trainer, CheckpointConfig(interval=interval, keep=keep), num_steps=8
    )
    start = keeper.restore()
    history = []
    for step in range(start, steps):
        samples = make_samples(seed=step, equal_rewards=step < equal_until)
        metrics = trainer.step(MemoryBatch(samples, step=step))
        history.append(
            (
                metrics["train/loss"],
                metrics["train/grad_norm"],
                metrics["train/lr"],
                float(torch.rand(1)),
            )
        )
        keeper.save_if_due(step + 1)
    weights = {
        name: tensor.float().numpy().copy()
        for name, tensor in WeightExporter(trainer.model).tensors()
    }
    return start, history, weights


def run(
    layout: dict[str, Any], *args: Any, **kwargs: Any
) -> tuple[int, list[list[tuple[float, ...]]], dict[str, np.ndarray]]:
    ranks = run_ranks(
        train, layout.get("num_ranks", 1), *args[:2], layout, *args[2:], megatron=True, **kwargs
    )
    return (
        ranks[0][0],
        [rank[1] for rank in ranks],
        {n: w for rank in ranks for n, w in rank[2].items()},
    )


def assert_same_weights(
    a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float = 0.0
) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert np.abs(a[name] - b[name]).max() <= tolerance, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [ONE, DP2, TP2, PP2, SHARDED])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    layout: dict[str, Any], dtype: str, path: Path, tmp_path: Path
) -> None:
    _, whole, weights = run(layout, path, tmp_path / "a", 4, dtype=dtype)
    run(layout, path, tmp_path / "b", 2, dtype=dtype)
    start, rest, resumed = run(layout, path, tmp_path / "b", 4, dtype=dtype)
    assert start == 2
    assert rest == [history[2:] for history in whole], (
        "losses, norms, rates or random numbers of some rank differ"
    )
    assert_same_weights(weights, resumed)


@pytest.mark.parametrize("layout", [DP2, SHARDED])
def test_a_checkpoint_before_the_first_update_of_all_is_resumed_too(
    layout: dict[str, Any], path: Path, tmp_path: Path
) -> None:
    """Rewards that are all equal skip the update, and Adam has no moments yet when the state is saved."""
    _, whole, weights = run(layout, path, tmp_path / "a", 4, equal_until=2)
    run(layout, path, tmp_path / "b", 2, equal_until=2)
    start, rest, resumed = run(layout, path, tmp_path / "b", 4, equal_until=2)
    assert start == 2
    assert rest == [history[2:] for history in whole]
    assert_same_weights(weights, resumed)


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        (ONE, TP2),
        (TP2, ONE),
        (TP2, PP2),
        (PP2, DP2),
        (DP2, PP2),
        (SHARDED, {"num_ranks": 2, "tp": 2, "distributed_optimizer": True}),
    ],
)
def test_another_layout_goes_on_from_the_same_state(
    saved: dict[str, Any], read: dict[str, Any], path: Path, tmp_path: Path
) -> None:
    """Within float32 rounding of the uninterrupted run; the vocabulary of 251 is padded under TP2
    only.
    """
    _, whole, weights = run(saved, path, tmp_path / "a", 4)
    shutil.rmtree(tmp_path / "a" / "step-000004")
    start, rest, resumed = run(read, path, tmp_path / "a", 4)
    assert start == 2
    np.testing.assert_allclose(
        np.array(rest[0])[:, :3], np.array(whole[0])[2:, :3], rtol=2e-4, atol=1e-5
    )
    assert_same_weights(weights, resumed, tolerance=2e-4)


def test_a_changed_reference_survives_the_restart(path: Path, tmp_path: Path) -> None:
    options = {"kl_loss_coef": 0.1, "ref_update_interval": 1}
    _, whole, weights = run(ONE, path, tmp_path / "a", 4, **options)
    shutil.rmtree(tmp_path / "a" / "step-000004")
    _, rest, resumed = run(ONE, path, tmp_path / "a", 4, **options)
    assert rest[0] == whole[0][2:]
    assert_same_weights(weights, resumed)


def truncate(folder: Path) -> None:
    file = folder / "rank-0001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder: Path) -> None:
    file = folder / "rank-0000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "rank-0001.safetensors has .* bytes, its commit says"),
        (flip, "rank-0000.safetensors does not have the digest"),
        (
            lambda folder: (folder / "rank-0000.safetensors").unlink(),
            "rank-0000.safetensors is missing",
        ),
        (
            lambda folder: (folder / "commit.json").unlink(),
            "no commit.json, the writer was stopped",
        ),
        (lambda folder: (folder / "commit.json").write_text("{"), "commit.json cannot be read"),
    ],
)
def test_the_newest_whole_checkpoint_is_taken_and_the_skipped_one_named(
    damage: Callable[[Path], None], reason: str, path: Path, tmp_path: Path
) -> None:
    import re

    run(DP2, path, tmp_path / "a", 4)
    damage(tmp_path / "a" / "step-000004")

    def resume(rank: int) -> tuple[int, str]:
        import io
        import logging

        stream = io.StringIO()
        logging.getLogger("vime_hpc.trainer.checkpoint").addHandler(logging.StreamHandler(stream))
        return train(rank, path, tmp_path / "a", DP2, 2)[0], stream.getvalue()

    (start, text), _ = run_ranks(resume, 2, megatron=True)
    assert start == 2
    assert "step-000004" in text
    assert re.search(reason, text), text


def test_only_damaged_checkpoints_stop_the_run_instead_of_starting_over(
    path: Path, tmp_path: Path
) -> None:
    run(DP2, path, tmp_path / "a", 2)
    flip(tmp_path / "a" / "step-000002")
    with pytest.raises(
        RankFailed, match=r"CheckpointCorruptError.*none of 1 checkpoints can be used.*step-000002"
    ):
        run(DP2, path, tmp_path / "a", 4)


def test_old_checkpoints_go_and_left_over_ones_too(path: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "step-000001.tmp").mkdir(parents=True)
    run(ONE, path, tmp_path / "a", 5, interval=1, keep=2)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["step-000004", "step-000005"]


def test_another_kind_of_optimizer_is_refused_with_the_setting(path: Path, tmp_path: Path) -> None:
    run(SHARDED, path, tmp_path / "a", 2)
    with pytest.raises(RankFailed, match=r"ConfigError.*Set trainer.distributed_optimizer = true"):
        run(DP2, path, tmp_path / "a", 3)


def test_another_model_is_refused_naming_the_tensor(path: Path, tmp_path: Path) -> None:
    run(ONE, path, tmp_path / "a", 2)
    other = make_model(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(RankFailed, match=r"CheckpointCorruptError.*policy:.*covers .* of the"):
        run(ONE, other, tmp_path / "a", 3)

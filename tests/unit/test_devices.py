"""Which GPU each rank of a node takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime_hpc.cluster.devices import own_gpus, visible_gpus
from vime_hpc.cluster.rank import layout, place
from vime_hpc.config.tree import RunConfig


def gpus_of(
    num_ranks: int, num_engines: int, tp: int, num_gpus: int, *, ranks_before: int = 0
) -> dict[str, list[int]]:
    """Every rank's GPUs, all ranks from `ranks_before` on standing on one node."""
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "trainer": {"num_ranks": num_ranks},
            "engine": {"num_engines": num_engines, "tp": tp},
        }
    )
    world = sum(size for _, size in layout(config))
    ranks = [
        place(config, g, world, local_rank=g - ranks_before, job_id="1", restart_count=0)
        for g in range(ranks_before, world)
    ]
    return {rank.name: own_gpus(config, rank, num_gpus) for rank in ranks}


@pytest.mark.parametrize(
    ("layout_", "num_gpus", "expected"),
    [
        ((1, 1, 1), 1, {"trainer-0": [0], "engine-0": [0], "rollout-0": []}),
        ((1, 1, 1), 2, {"trainer-0": [0], "engine-0": [1], "rollout-0": []}),
        ((2, 1, 2), 4, {"trainer-0": [0], "trainer-1": [1], "engine-0": [2, 3], "rollout-0": []}),
        (
            (2, 2, 1),
            2,
            {"trainer-0": [0], "trainer-1": [1], "engine-0": [0], "engine-1": [1], "rollout-0": []},
        ),
        ((1, 1, 1), 0, {"trainer-0": [], "engine-0": [], "rollout-0": []}),
    ],
)
def test_trainers_and_engines_of_a_node_share_a_gpu_only_where_there_are_too_few(
    layout_: tuple[int, int, int], num_gpus: int, expected: dict[str, list[int]]
) -> None:
    assert gpus_of(*layout_, num_gpus) == expected


def test_engines_on_a_node_of_their_own_begin_at_its_first_gpu() -> None:
    """Two trainer ranks stand on another node."""
    assert gpus_of(2, 2, 2, 4, ranks_before=2) == {
        "engine-0": [0, 1],
        "engine-1": [2, 3],
        "rollout-0": [],
    }


def test_gpus_are_those_of_the_environment_or_of_the_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,GPU-ab"}, tmp_path) == ["3", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({}, tmp_path / "nowhere") == []

"""`vime-hpc advantages` on JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.cli.main import main


def advantages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any, *options: str
) -> dict[str, Any]:
    path = tmp_path / "rewards.json"
    path.write_text(json.dumps(data))
    code = main(["advantages", str(path), "--json", *options])
    out, err = capsys.readouterr()
    return {"code": code, "err": err, **(json.loads(out) if out else {})}


def test_groups_of_unequal_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {
        "group_index": [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2],
        "rewards": [1, 0, 1, 0, 5, 5, 5, 2, 4, 2, 4],
    }
    result = advantages(tmp_path, capsys, data, "--estimator", "grpo_no_std")
    assert result["advantages"] == [0.5, -0.5, 0.5, -0.5, 0, 0, 0, -1, 1, -1, 1]


def test_the_summary_is_of_magnitudes_and_whole_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"group_id": g, "reward": r} for g, r in ((0, 1), (0, 0), (1, 1), (1, 1))]
    result = advantages(tmp_path, capsys, rows)
    assert result["mean_abs_advantage"] == pytest.approx(0.353553, abs=1e-6)
    assert result["zero_spread_share"] == 0.5


def test_object_rewards_are_read_through_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"group_id": [0, 0], "reward": [{"acc": 1, "fmt": 0}, {"acc": 0, "fmt": 1}]}
    good = advantages(tmp_path, capsys, data, "--reward-key", "acc", "--estimator", "grpo_no_std")
    assert good["advantages"] == [0.5, -0.5]
    bad = advantages(tmp_path, capsys, data, "--reward-key", "score")
    assert bad["code"] == 2
    assert "['acc', 'fmt']" in bad["err"]


@pytest.mark.parametrize(
    ("data", "code", "named"),
    [
        ({"reward": [1, 0]}, 3, "group_id"),
        ([{"group_id": 0, "reward": 1}, {"reward": 0}], 3, "row 1 has no group_id"),
        ({"group_id": [0], "reward": [1, 0]}, 3, "2 rewards, 1 group ids"),
        ({"group_id": [0, 0], "rollout_id": [4, 4], "reward": [1, 0]}, 3, "share its reward"),
    ],
)
def test_what_cannot_be_grouped_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any, code: int, named: str
) -> None:
    result = advantages(tmp_path, capsys, data)
    assert result["code"] == code
    assert named in result["err"]


def test_null_rewards_are_unusable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = advantages(
        tmp_path, capsys, {"group_id": [0, 0, 0], "reward": [1, None, 0]}, "--estimator", "rloo"
    )
    assert result["advantages"] == [1.0, 0.0, -1.0]
    assert result["num_unusable"] == 1

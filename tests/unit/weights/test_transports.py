"""Every transport through the same scenarios: afterwards each engine rank holds the right version, or an error names the cause."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from vime_hpc.errors import CheckpointCorruptError, DeadlineError, VimeError, WeightsMismatchError
from vime_hpc.testing.transport_suite import (
    ENGINES,
    TRAINER,
    TRANSPORTS,
    Faults,
    Items,
    Outcome,
    Scenario,
    plan_of,
    should_hold,
    tensors_of,
)
from vime_hpc.weights.version_directory import read_manifest, versions_in

every_transport = pytest.mark.parametrize("transport", TRANSPORTS)
IMPATIENT_S = 2.0  # counts from the fault


def both_hold(outcome: Outcome, version: int) -> bool:
    return outcome.held == {
        e: (version, should_hold(outcome.transport, e, version)) for e in ENGINES
    }


def nothing_wrong_is_held(outcome: Outcome) -> bool:
    """Whatever an engine rank reported as held is bit for bit what the trainer had as that version."""
    return all(
        root == should_hold(outcome.transport, engine, v)
        for engine, (v, root) in outcome.held.items()
    )


@every_transport
def test_versions_arrive_bit_for_bit_and_a_resumed_run_starts_anew(
    transport: str, tmp_path: Path
) -> None:
    fresh = Scenario(transport, tmp_path, tag="job-0").run([0, 1, 2])
    assert fresh.errors == {}
    assert fresh.published == [0, 1, 2]
    assert both_hold(fresh, 2)
    resumed = Scenario(transport, tmp_path, tag="job-1").run([1, 2])
    assert resumed.errors == {}
    assert both_hold(resumed, 2)
    if transport in ("disk", "delta"):
        kinds = {v: read_manifest(f).kind for v, f in versions_in(tmp_path).items()}
        later = "full" if transport == "disk" else "delta"
        assert kinds == {0: "full", 1: "full", 2: later}


@every_transport
@pytest.mark.parametrize("point", ["before", "within", "after"])
def test_a_receiver_that_dies_stops_the_publish_and_nobody_holds_anything_else(
    transport: str, point: str, tmp_path: Path
) -> None:
    scenario = Scenario(transport, tmp_path, timeout_s=IMPATIENT_S)
    outcome = scenario.run([1, 2], Faults(die=(ENGINES[1], 1, point)))
    assert nothing_wrong_is_held(outcome)
    assert outcome.published == ([1] if point == "after" else [])
    assert all(isinstance(e, VimeError) for e in outcome.errors.values()), outcome.texts
    assert outcome.errors.keys() == {TRAINER, ENGINES[0]}
    assert "engine 1" in outcome.texts or "engine rank 1" in outcome.texts


@every_transport
@pytest.mark.parametrize("point", ["before", "within"])
def test_a_sender_that_dies_leaves_the_version_before_in_place(
    transport: str, point: str, tmp_path: Path
) -> None:
    scenario = Scenario(transport, tmp_path, timeout_s=IMPATIENT_S)
    outcome = scenario.run([1, 2], Faults(die=(TRAINER, 2, point)))
    assert nothing_wrong_is_held(outcome)
    assert outcome.published == [1]
    assert {v for v, _ in outcome.held.values()} == {1}
    assert "trainer" in outcome.texts
    assert "version" in outcome.texts


@every_transport
def test_a_receiver_that_hangs_ends_every_wait_at_its_deadline_by_name(
    transport: str, tmp_path: Path
) -> None:
    scenario = Scenario(transport, tmp_path, timeout_s=IMPATIENT_S)
    outcome = scenario.run([1], Faults(hang=(ENGINES[1], 1, "within")))
    assert outcome.published == []
    assert any(isinstance(e, DeadlineError) for e in outcome.errors.values()), outcome.texts
    assert "engine 1" in outcome.texts or "engine rank 1" in outcome.texts


def dropped(items: Items) -> Items:
    return [item for item in items if item[0] != "c.weight"]


def surplus(items: Items) -> Items:
    return [*items, ("f.weight", items[0][1])]


def renamed(items: Items) -> Items:
    return [("z.weight" if n == "c.weight" else n, t) for n, t in items]


def duplicated(items: Items) -> Items:
    return [*items[:3], items[2], *items[3:]]


def transposed(items: Items) -> Items:
    return [(n, t.t() if n == "c.weight" else t) for n, t in items]


@every_transport
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dropped, "c.weight"),
        (surplus, "f.weight"),
        (renamed, "z.weight"),
        (duplicated, "c.weight"),
        (transposed, "c.weight"),
    ],
)
def test_tensors_that_are_not_the_plans_are_refused_by_name(
    transport: str, change: object, name: str, tmp_path: Path
) -> None:
    outcome = Scenario(transport, tmp_path).run([1, 2], Faults(change=change))  # type: ignore[arg-type]
    assert outcome.published == [1]
    assert nothing_wrong_is_held(outcome)
    assert {v for v, _ in outcome.held.values()} == {1}
    assert isinstance(outcome.errors[TRAINER], WeightsMismatchError)
    assert name in str(outcome.errors[TRAINER])


@every_transport
def test_a_flipped_byte_is_found_by_tensor_before_the_version_counts(
    transport: str, tmp_path: Path
) -> None:
    outcome = Scenario(transport, tmp_path).run([1, 2], Faults(flip="d.weight"))
    assert outcome.published == [1]
    assert {v for v, _ in outcome.held.values()} == {1}
    assert nothing_wrong_is_held(outcome)
    assert "d.weight" in str(outcome.errors[TRAINER])
    assert "a.weight" not in outcome.texts
    if transport in ("disk", "delta"):
        assert any(isinstance(e, CheckpointCorruptError) for e in outcome.errors.values())
        assert "v000002" in outcome.texts


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_a_full_disk_is_named_and_no_part_of_the_version_is_seen(
    transport: str, tmp_path: Path
) -> None:
    room = plan_of(tensors_of(0)).nbytes + 20_000  # one full version and a little
    outcome = Scenario(transport, tmp_path).run([1, 2], Faults(room=room))
    assert outcome.published == [1]
    assert "No space left on device" in str(outcome.errors[TRAINER])
    assert "version 2" in str(outcome.errors[TRAINER])
    assert {v for v, _ in outcome.held.values()} == {1}
    assert not (tmp_path / "v000002" / "version.json").exists()
    assert not any(p.stat().st_size for p in (tmp_path / "v000002").iterdir())


def swapped(source: Path, target: Path, version: int) -> None:
    """Another attempt wrote its own version 1 meanwhile."""
    if version == 2:
        for file in source.iterdir():
            (target / file.name).write_bytes(file.read_bytes())


def test_a_delta_over_another_base_is_refused_with_the_names_of_its_tensors(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    assert Scenario("delta", other).run([3]).published == [3]

    swap = partial(swapped, other / "v000003", tmp_path / "run" / "v000001")
    scenario = Scenario("delta", tmp_path / "run", timeout_s=10.0)
    outcome = scenario.run([1, 2], Faults(before=swap))
    assert outcome.published == [1]
    assert nothing_wrong_is_held(outcome)
    text = str(outcome.errors[ENGINES[0]])
    assert "changes over version 1" in text
    assert "a.weight, b.weight, d.weight differ" in text


def test_after_so_many_deltas_comes_a_full_version_and_old_ones_go(tmp_path: Path) -> None:
    scenario = Scenario("delta", tmp_path, max_deltas=2, keep=1)
    outcome = scenario.run([1, 2, 3, 4, 5])
    assert both_hold(outcome, 5)
    kinds = {v: read_manifest(f).kind for v, f in versions_in(tmp_path).items()}
    assert kinds == {4: "full", 5: "delta"}

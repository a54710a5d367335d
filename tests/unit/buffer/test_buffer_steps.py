"""Writers and readers together: acknowledging, sealing, committing, fencing, recovering."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vime_hpc.buffer.files import Disk
from vime_hpc.buffer.index import encode_record
from vime_hpc.buffer.journal import Journal
from vime_hpc.buffer.reader import BufferReader, StepBatch
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.errors import (
    BufferCorruptError,
    ConfigError,
    DamagedDataError,
    DeadlineError,
    RunLockedError,
)
from vime_hpc.testing.buffer_suite import make_group, same_groups, same_sample
from vime_hpc.types import PromptGroup

SCHEMA = BufferSchema(RoutingShape(num_layers=3, top_k=2, num_experts=8))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    RolloutBuffer.create(tmp_path / "buffer", run_id="run-1", schema=SCHEMA, durable=False)
    return tmp_path


def writer(run: Path, attempt: int = 0, worker: int = 0, num_workers: int = 1) -> BufferWriter:
    return BufferWriter(run, worker=worker, num_workers=num_workers, attempt=attempt, durable=False)


def groups(*ids: int, salt: int = 0) -> list[PromptGroup]:
    return [make_group(SCHEMA, group_id, salt=salt) for group_id in ids]


def commit(sink: BufferWriter, step: int, *ids: int) -> None:
    sink.append(
        step,
        groups(*ids),
        resume_state={"cursor": step},
        stats={"num_dropped": 1, "reward_mean": float(step)},
    )


def ids_of(batch: StepBatch) -> list[int]:
    return sorted(set(batch.table.group_id.tolist()))


def test_a_committed_step_reads_back_bit_for_bit_with_its_stats_and_resume_state(run: Path) -> None:
    commit(writer(run), 0, 2, 0, 1)
    reader = BufferReader(run)
    batch = reader.wait_for(0, timeout_s=1)
    assert batch.table.sample_id.tolist() == sorted(batch.table.sample_id.tolist())
    wanted = [sample for group in groups(0, 1, 2) for sample in group.samples]
    assert all(map(same_sample, batch.read(range(6)), wanted))
    assert all(map(same_sample, batch.read([5, 0, 3]), [wanted[5], wanted[0], wanted[3]]))
    assert batch.stats == {"num_dropped": 1.0, "reward_mean": 0.0}
    assert reader.last_resume_state() == {"cursor": 0}
    assert reader.next_step == 1


def test_the_table_agrees_with_the_samples_it_describes(run: Path) -> None:
    sink = writer(run)
    failed = make_group(SCHEMA, 7)
    failed = replace(
        failed, samples=(failed.samples[0].with_reward(None, "no answer"), failed.samples[1])
    )
    sink.append(0, [failed, *groups(3)], resume_state={}, stats={})
    batch = BufferReader(run).batch(0)
    for row, sample in enumerate(batch.read(range(len(batch)))):
        assert batch.table.mask_sum[row] == sample.loss_mask.sum()
        assert batch.table.prompt_length[row] == sample.prompt_length
        assert batch.table.reward_usable[row] == (sample.reward is not None)
        assert batch.table.weight_version[row] == min(span.version for span in sample.versions)
    assert np.isnan(batch.table.reward[~batch.table.reward_usable]).all()
    assert (~batch.table.reward_usable).sum() == 1


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_any_number_of_workers_commits_the_same_samples_once(run: Path, num_workers: int) -> None:
    sinks = [writer(run, worker=worker, num_workers=num_workers) for worker in range(num_workers)]
    reader = BufferReader(run)
    for worker, sink in enumerate(sinks):
        assert reader.committed_steps() == []
        commit(sink, 0, *[group for group in range(8) if group % num_workers == worker])
    batch = reader.batch(0)
    assert batch.table.sample_id.tolist() == [
        sample.sample_id for group in groups(*range(8)) for sample in group.samples
    ]
    one = [sample for group in groups(*range(8)) for sample in group.samples]
    assert all(map(same_sample, batch.read(range(16)), one))
    assert batch.stats["num_dropped"] == num_workers


def test_counts_of_several_workers_add_up_and_extremes_stay_extremes(run: Path) -> None:
    """What a step dropped and what failed in it is known however many workers made it."""
    stats = [
        {"r/dynamic_filter/drop_even": 3, "r/failed": 1, "r/lengths_max": 9, "r/lengths_min": 4}
        | {"r/share": 0.5, "p/tokens_per_s": 10, "p/rollout_time": 2, "r/response_tokens": 6},
        {"r/failed": 2, "r/lengths_max": 7, "r/lengths_min": 5, "r/zero_std/count_1.0": 1}
        | {"r/share": 0.25, "p/tokens_per_s": 20, "p/rollout_time": 3, "r/response_tokens": 8},
    ]
    for worker, own in enumerate(stats):
        ids = [worker] if worker else [2, 4, 6]
        writer(run, worker=worker, num_workers=2).append(
            0, groups(*ids), resume_state={}, stats=own
        )
    assert BufferReader(run).batch(0).stats == {
        "p/rollout_time": 3,
        "p/tokens_per_s": 30,
        "r/dynamic_filter/drop_even": 3,
        "r/failed": 3,
        "r/lengths_max": 9,
        "r/lengths_min": 4,
        "r/response_tokens": 14,
        "r/share": 0.4375,
        "r/zero_std/count_1.0": 1,
    }


def test_content_digest_does_not_depend_on_who_wrote_the_samples(tmp_path: Path) -> None:
    """Case C68."""
    digests = set()
    for num_workers in (1, 2, 4):
        root = tmp_path / str(num_workers)
        RolloutBuffer.create(root, run_id="r", schema=SCHEMA, durable=False)
        for worker in range(num_workers):
            commit(
                writer(root, worker=worker, num_workers=num_workers),
                0,
                *range(worker, 8, num_workers),
            )
        digests.add(BufferReader(root).batch(0).content_digest())
    assert len(digests) == 1


def test_workers_that_seal_at_the_same_moment_commit_exactly_once(run: Path) -> None:
    sinks = [writer(run, worker=worker, num_workers=4) for worker in range(4)]
    for step in range(5):
        threads = [
            threading.Thread(target=commit, args=(sink, step, step * 4 + worker))
            for worker, sink in enumerate(sinks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert BufferReader(run).committed_steps() == list(range(step + 1))
    assert ids_of(BufferReader(run).batch(4)) == [16, 17, 18, 19]


def test_waiting_names_the_workers_that_have_not_sealed(run: Path) -> None:
    sinks = [writer(run, worker=worker, num_workers=3) for worker in range(3)]
    commit(sinks[1], 0, 1)
    with pytest.raises(
        DeadlineError,
        match=r"step 0 .* sealed by workers \[1\], missing workers \[0, 2\] of attempt 0",
    ):
        BufferReader(run).wait_for(0, timeout_s=0.05)


def test_waiting_returns_as_soon_as_the_step_is_committed(run: Path) -> None:
    sink = writer(run)
    timer = threading.Timer(0.3, commit, args=(sink, 0, 0))
    timer.start()
    start = time.monotonic()
    assert BufferReader(run, timeout_s=20).wait_for(0).step == 0
    assert time.monotonic() - start < 15


def test_a_batch_can_be_made_from_the_broadcast_commit_alone(run: Path) -> None:
    commit(writer(run), 0, 0, 1)
    message = json.loads(json.dumps(BufferReader(run).commit(0)))
    assert len(StepBatch.from_commit(run, message).read([0, 3])) == 2
    message["workers"][0]["segment"]["file"] = "../../etc/passwd"
    with pytest.raises(BufferCorruptError):
        StepBatch.from_commit(run, message)
    forged = json.loads(encode_record(message))
    with pytest.raises(BufferCorruptError, match="names the segment"):
        StepBatch.from_commit(run, forged)


def test_a_moved_run_directory_reads_and_goes_on(run: Path, tmp_path: Path) -> None:
    sink = writer(run)
    commit(sink, 0, 0)
    sink.journal_group(1, groups(1)[0])
    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    shutil.copytree(tmp_path, moved)
    shutil.rmtree(tmp_path / "buffer")
    again = writer(moved, attempt=1)
    assert same_groups(again.recovered_groups(1), groups(1))
    assert len(BufferReader(moved).batch(0).read([0, 1])) == 2


# --- recovery -----------------------------------------------------------------------------------------------------------


def test_acknowledged_groups_come_back_at_the_next_start(run: Path) -> None:
    sink = writer(run)
    for group in groups(4, 2, 9):
        sink.journal_group(0, group)
    again = writer(run, attempt=1)
    assert again.next_step == 0
    assert same_groups(again.recovered_groups(0), groups(2, 4, 9))
    commit(again, 0, 2, 4, 9)
    entry = BufferReader(run).commit(0)["workers"][0]["segment"]
    assert entry["num_recovered_groups"] == 3


def test_groups_survive_any_number_of_attempts_until_their_step_is_committed(run: Path) -> None:
    for attempt in range(5):
        sink = writer(run, attempt=attempt)
        assert [group.group_id for group in sink.recovered_groups(0)] == list(range(attempt))
        sink.journal_group(0, groups(attempt)[0])


def test_a_part_sealed_by_a_dead_attempt_is_reused_though_its_step_was_never_committed(
    run: Path,
) -> None:
    commit(writer(run, worker=0, num_workers=2), 0, 0, 2)
    again = [writer(run, attempt=1, worker=worker, num_workers=2) for worker in range(2)]
    assert [sink.next_step for sink in again] == [0, 0]
    assert same_groups(again[0].recovered_groups(0), groups(0, 2))
    assert again[1].recovered_groups(0) == []


def test_another_number_of_workers_takes_over_every_acknowledged_group_once(run: Path) -> None:
    for worker in range(4):
        sink = writer(run, worker=worker, num_workers=4)
        for group in range(worker, 12, 4):
            sink.journal_group(0, groups(group)[0])
    again = [writer(run, attempt=1, worker=worker, num_workers=3) for worker in range(3)]
    assert sorted(group.group_id for sink in again for group in sink.recovered_groups(0)) == list(
        range(12)
    )


class StopsBeforeCommit(Disk):
    """The process ends when the commit is written but does not have its name yet."""

    def at(self, point: str) -> None:
        if point == "commit.written":
            raise KeyboardInterrupt


def test_a_step_every_worker_sealed_is_committed_at_the_next_start(run: Path) -> None:
    commit(writer(run, worker=0, num_workers=2), 0, 0)
    dying = BufferWriter(
        run, worker=1, num_workers=2, attempt=0, disk=StopsBeforeCommit(durable=False)
    )
    with pytest.raises(KeyboardInterrupt):
        commit(dying, 0, 1)
    assert BufferReader(run).committed_steps() == []
    again = [writer(run, attempt=1, worker=worker, num_workers=2) for worker in range(2)]
    assert [sink.next_step for sink in again] == [1, 1]
    assert again[1].last_resume_state() == {"cursor": 0}
    assert ids_of(BufferReader(run).batch(0)) == [0, 1]


def test_surplus_groups_move_to_the_next_step_and_survive_a_kill_right_after(run: Path) -> None:
    sink = writer(run)
    for group in groups(0, 1, 2, 3):
        sink.journal_group(0, group)
    commit(sink, 0, 0, 2)
    assert [group.group_id for group in sink.recovered_groups(1)] == [1, 3]
    again = writer(run, attempt=1)
    assert same_groups(again.recovered_groups(1), groups(1, 3))


def test_a_discarded_group_does_not_come_back(run: Path) -> None:
    sink = writer(run)
    for group in groups(0, 1):
        sink.journal_group(0, group)
    sink.discard_group(0, 1)
    assert [group.group_id for group in writer(run, attempt=1).recovered_groups(0)] == [0]


def test_a_carried_group_is_not_handed_out_twice_when_the_carrying_attempt_died_before_its_commit(
    run: Path,
) -> None:
    sink = writer(run)
    for group in groups(0, 1):
        sink.journal_group(0, group)
    sink._carry_over(
        0, {0}
    )  # the surplus is journaled for step 1, then the process dies before the seal
    again = writer(run, attempt=1)
    assert [group.group_id for group in again.recovered_groups(0)] == [0, 1]
    assert again.recovered_groups(1) == []
    commit(again, 0, 0, 1)
    assert writer(run, attempt=2).recovered_groups(1) == []


def test_the_trained_sequence_has_every_prompt_once_over_a_kill_between_steps(run: Path) -> None:
    """8 prompts, 2 a step, 4 started at once; the process dies after the first step was trained."""
    sink = writer(run)
    for group in groups(0, 1, 2, 3):
        sink.journal_group(0, group)
    commit(sink, 0, 0, 1)
    trained, attempt = [0, 1], 1
    for step in (1, 2, 3):
        sink = writer(run, attempt=attempt)
        attempt += 1
        ready = {group.group_id for group in sink.recovered_groups(step)}
        cursor = 2 * step
        for group in range(cursor, min(cursor + 4, 8)):
            if group not in ready:
                sink.journal_group(step, groups(group)[0])
        commit(sink, step, cursor, cursor + 1)
        trained += ids_of(BufferReader(run).batch(step))
    assert trained == list(range(8))
    assert BufferReader(run).commit(1)["workers"][0]["segment"]["num_recovered_groups"] == 2


def test_a_restarted_worker_of_the_same_attempt_goes_on_with_its_own_journal_only(
    run: Path,
) -> None:
    sinks = [writer(run, worker=worker, num_workers=2) for worker in range(2)]
    sinks[0].journal_group(0, groups(0)[0])
    sinks[1].journal_group(
        0, groups(2)[0]
    )  # worker 1 works on a group worker 0 would own by default
    again = writer(run, worker=0, num_workers=2)
    assert [group.group_id for group in again.recovered_groups(0)] == [0]
    again.journal_group(0, groups(4)[0])
    assert [
        group.group_id for group in writer(run, worker=0, num_workers=2).recovered_groups(0)
    ] == [0, 4]


def test_a_torn_tail_is_cut_and_named_and_damage_in_the_middle_costs_only_what_it_hit(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = writer(run)
    sizes = []
    path = run / "buffer/journal/e0000/step-000000.worker-0000.log"
    for group in groups(0, 1, 2):
        sink.journal_group(0, group)
        sizes.append(path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[sizes[0] + 100] ^= 1
    path.write_bytes(bytes(data[:-7]) + b"")
    with caplog.at_level(logging.WARNING):
        again = writer(run, attempt=1)
    assert same_groups(again.recovered_groups(0), groups(0))
    assert "never acknowledged" in caplog.text
    data[-7:] = data[-7:]
    fenced = run / "buffer/journal/e0000.fenced/step-000000.worker-0000.log"
    fenced.write_bytes(bytes(data))
    with caplog.at_level(logging.ERROR):
        assert same_groups(writer(run, attempt=2).recovered_groups(0), groups(0, 2))
    assert "damaged from byte" in caplog.text


# --- fencing ------------------------------------------------------------------------------------------------------------


def test_a_stale_writer_can_neither_acknowledge_nor_commit(run: Path) -> None:
    stale = writer(run)
    stale.journal_group(0, groups(0)[0])
    fresh = writer(run, attempt=1)
    with pytest.raises(RunLockedError, match="fenced off"):
        stale.journal_group(0, groups(1)[0])
    with pytest.raises(RunLockedError, match="fenced off"):
        commit(stale, 0, 0)
    commit(fresh, 0, 0, 5)
    assert ids_of(BufferReader(run).batch(0)) == [0, 5]
    assert BufferReader(run).commit(0)["attempt"] == 1


def test_a_writer_of_an_earlier_attempt_is_refused_with_the_next_free_number(run: Path) -> None:
    writer(run, attempt=3)
    with pytest.raises(RunLockedError, match="next free one is 4"):
        writer(run, attempt=2)
    assert RolloutBuffer.open(run).next_attempt() == 4


def test_a_writer_that_started_too_late_does_not_stand_in_the_way_of_the_next_attempt(
    run: Path,
) -> None:
    writer(run).journal_group(0, groups(0)[0])
    writer(run, attempt=2)
    late = run / "buffer/journal/e0000"
    late.mkdir()
    (late / "worker-0000.json").write_text("{}")
    again = writer(run, attempt=3)
    assert [group.group_id for group in again.recovered_groups(0)] == [0]
    assert not late.exists()


def test_leftovers_of_dead_attempts_are_swept_and_named(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit(writer(run, worker=0, num_workers=2), 0, 0)
    half = run / "buffer/segments/step-000000/worker-0001.e0000.h5.aside"
    half.write_bytes(b"half")
    with caplog.at_level(logging.INFO):
        commit(writer(run, attempt=1), 0, 0, 1)
    assert not half.exists()
    assert half.name in caplog.text
    assert sorted(path.name for path in half.parent.iterdir()) == ["worker-0000.e0001.h5"]
    assert [path.name for path in (run / "buffer/journal").iterdir()] == ["e0001"]


# --- refusals -----------------------------------------------------------------------------------------------------------


def test_samples_with_broken_logprobs_are_kept_but_not_usable(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group(SCHEMA, 0)
    broken = replace(
        group.samples[0],
        rollout_logprobs=np.array([-0.1, np.nan, -np.inf, -1], np.float32),
        loss_mask=np.ones(4, np.uint8),
    )
    with caplog.at_level(logging.WARNING):
        writer(run).append(
            0, [replace(group, samples=(broken, group.samples[1]))], resume_state={}, stats={}
        )
    batch = BufferReader(run).batch(0)
    assert batch.table.reward_usable.tolist() == [False, True]
    assert (
        batch.read([0])[0].reward_cause == "rollout_logprobs not finite at response tokens [1, 2]"
    )
    assert "1 of 2 samples unusable" in caplog.text


def test_a_step_is_sealed_once_and_in_order(run: Path) -> None:
    sink = writer(run)
    with pytest.raises(ConfigError, match="expected step 0"):
        commit(sink, 1, 0)
    commit(sink, 0, 0)
    with pytest.raises(ConfigError, match="step 0 is sealed"):
        commit(sink, 0, 0)


def test_a_sample_that_is_refused_leaves_no_trace(run: Path) -> None:
    sink = writer(run)
    group = make_group(SCHEMA, 0)
    with pytest.raises(DamagedDataError, match="appears twice"):
        sink.append(0, [group, group], resume_state={}, stats={})
    with pytest.raises(DamagedDataError, match="no samples"):
        sink.append(0, [PromptGroup(0, 0, ())], resume_state={}, stats={})
    with pytest.raises(DamagedDataError, match="lies in group 9"):
        sink.append(0, [replace(group, group_id=9)], resume_state={}, stats={})
    commit(sink, 0, 0)
    assert ids_of(BufferReader(run).batch(0)) == [0]


def test_an_expert_the_model_does_not_have_is_refused_while_the_segment_is_written(
    tmp_path: Path,
) -> None:
    """The segment's writer looks at the ids when it turns them, so half the file may be there by then."""
    schema = BufferSchema(RoutingShape(num_layers=2, top_k=2, num_experts=8))
    RolloutBuffer.create(tmp_path, run_id="run-1", schema=schema)
    group = make_group(schema, 3)
    experts = group.samples[1].routed_experts
    assert experts is not None
    experts = experts.copy()
    experts[1, 2] = 8
    wrong = replace(group.samples[1], routed_experts=experts)
    with BufferWriter(tmp_path) as sink:
        with pytest.raises(
            DamagedDataError, match=r"\(group 3, index 1\).* id 8 at row 1, layer 1"
        ):
            sink.append(
                0, [replace(group, samples=(group.samples[0], wrong))], resume_state={}, stats={}
            )
        assert not list(tmp_path.rglob("worker-0000.e*"))
        sink.append(0, [group], resume_state={}, stats={})
    assert RolloutBuffer.open(tmp_path).steps() == [0]


def test_a_buffer_of_another_run_or_schema_is_not_reused(run: Path) -> None:
    RolloutBuffer.create(run / "buffer", run_id="run-1", schema=SCHEMA)
    with pytest.raises(ConfigError, match="run 'run-1'"):
        RolloutBuffer.create(run / "buffer", run_id="run-2", schema=SCHEMA)
    with pytest.raises(ConfigError, match="sampling_temperature"):
        RolloutBuffer.create(
            run / "buffer", run_id="run-1", schema=replace(SCHEMA, sampling_temperature=0.5)
        )
    with pytest.raises(ConfigError, match="no rollout buffer here"):
        RolloutBuffer.open(run / "nowhere")


def test_workers_that_disagree_about_their_number_are_refused(run: Path) -> None:
    writer(run, worker=0, num_workers=2)
    with pytest.raises(ConfigError, match="same number"):
        writer(run, worker=1, num_workers=3)


def test_a_missing_commit_in_the_middle_is_named_not_written_over(run: Path) -> None:
    sink = writer(run)
    for step in range(3):
        commit(sink, step, step)
    (run / "buffer/steps/000001.json").unlink()
    with pytest.raises(BufferCorruptError, match=r"\[1\] are missing"):
        writer(run, attempt=1)


def test_threads_that_acknowledge_the_first_groups_of_a_step_at_once_lose_none(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads find no journal yet; the file must be opened once, or the second opening cuts the first one's frames."""
    sink = BufferWriter(run)
    opened = []
    original = sink._open_journal

    def slow(step: int) -> Journal:
        journal = original(step)
        opened.append(step)
        time.sleep(0.05)
        return journal

    monkeypatch.setattr(sink, "_open_journal", slow)
    work = groups(*range(8))
    threads = [threading.Thread(target=sink.journal_group, args=(0, group)) for group in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [0]
    assert same_groups(writer(run, attempt=1).recovered_groups(0), work)


def test_concurrent_acknowledgements_share_their_syncs_and_all_come_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = BufferWriter(run)
    syncs: list[int] = []
    written, all_written = threading.Semaphore(0), threading.Event()
    sync, append = sink._disk.sync_descriptor, Journal._append

    def counted_append(journal: Journal, kind: int, payload: bytes) -> int:
        size = append(journal, kind, payload)
        written.release()
        return size

    def first_waits(descriptor: int) -> None:
        syncs.append(descriptor)
        assert len(syncs) > 1 or all_written.wait(60)
        sync(descriptor)

    monkeypatch.setattr(Journal, "_append", counted_append)
    monkeypatch.setattr(sink._disk, "sync_descriptor", first_waits)
    work = groups(*range(8))
    threads = [threading.Thread(target=sink.journal_group, args=(0, group)) for group in work]
    for thread in threads:
        thread.start()
    for _ in work:
        assert written.acquire(timeout=60)
    all_written.set()
    for thread in threads:
        thread.join()
    assert len(syncs) <= 2, "one under way while the others wrote, one for all of those"
    assert same_groups(writer(run, attempt=1).recovered_groups(0), work)

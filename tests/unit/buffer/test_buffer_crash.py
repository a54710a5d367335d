"""Whatever is killed, cut, flipped, refused or lost by the device: nothing acknowledged is lost, nothing wrong is read."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vime_hpc.buffer.files import Disk
from vime_hpc.buffer.index import read_commit
from vime_hpc.buffer.journal import Journal, replay
from vime_hpc.buffer.reader import BufferReader, StepBatch
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.errors import BufferCorruptError
from vime_hpc.testing.buffer_crash import (
    SCHEMA,
    CrashReport,
    Ledger,
    check_promises,
    groups_of,
    random_kills,
    run_and_kill,
    write_steps,
)
from vime_hpc.testing.buffer_suite import (
    FailingDisk,
    KillingDisk,
    RecordingDisk,
    make_group,
    same_groups,
    same_sample,
)
from vime_hpc.testing.power_loss import Replay, record

NOTHING_LOST = (0, 0, 0)


def losses(report: CrashReport) -> tuple[int, int, int]:
    return report.lost, report.wrong, report.unreadable


def new_buffer(root: Path) -> Path:
    RolloutBuffer.create(root, run_id="crash", schema=SCHEMA, durable=False)
    return root


@pytest.mark.timeout(1200)  # 45 s of processor time, on a machine that may be busy
def test_300_random_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    report = random_kills(tmp_path, 300, seed=int(os.environ.get("CRASH_SEED", "1")), durable=False)
    assert report.kills == 300
    assert report.acknowledged > 300
    assert losses(report) == NOTHING_LOST, str(report)


def test_a_kill_at_every_point_of_the_write_protocol_loses_nothing(tmp_path: Path) -> None:
    disk = RecordingDisk()
    write_steps(new_buffer(tmp_path / "recorded"), 0, 2, disk, lambda line: None)
    assert {
        "attempt.entered",
        "journal.written",
        "journal.durable",
        "segment.written",
        "segment.synced",
        "segment.durable",
        "seal.written",
        "seal.durable",
        "commit.written",
        "commit.durable",
        "swept",
    } <= set(disk.points)
    for point in range(len(disk.points)):
        root, ledger, report = new_buffer(tmp_path / str(point)), Ledger(), CrashReport()
        assert run_and_kill(root, 0, 2, KillingDisk(point), None, ledger), disk.points[point]
        check_promises(root, 1, ledger, report)
        assert losses(report) == NOTHING_LOST, (point, disk.points[point], str(report))
        assert not run_and_kill(root, 2, 2, Disk(durable=False), None, ledger)
        assert BufferReader(root).committed_steps() == [0, 1]


def test_a_second_kill_during_recovery_loses_nothing(tmp_path: Path) -> None:
    for point in range(0, 30, 3):
        root, ledger, report = new_buffer(tmp_path / str(point)), Ledger(), CrashReport()
        run_and_kill(root, 0, 2, KillingDisk(14), None, ledger)
        run_and_kill(root, 1, 2, KillingDisk(point), None, ledger)
        check_promises(root, 2, ledger, report)
        assert losses(report) == NOTHING_LOST, (point, str(report))


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_an_error_of_the_device_at_any_call_loses_nothing(tmp_path: Path, error: int) -> None:
    for call in range(60):
        root, ledger, report = new_buffer(tmp_path / str(call)), Ledger(), CrashReport()
        disk = FailingDisk(error, call)
        try:
            write_steps(root, 0, 2, disk, ledger.note)
        except OSError:
            assert disk.has_failed
        else:
            assert not disk.has_failed
            assert call > 20
            break
        check_promises(root, 1, ledger, report)
        assert losses(report) == NOTHING_LOST, (call, str(report))
    else:
        pytest.fail("the writer never got through")


SMALL_FILE_SYSTEMS = ["tmpfs"]
if Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4"):
    SMALL_FILE_SYSTEMS.append("ext4")


def mounted(mount: Path, kind: str) -> bool:
    """A file system of a few MiB, in memory or in a file behind a loop device; False where that is not to be had."""
    mount.mkdir()
    image = mount.with_suffix(".img")
    commands = {
        "tmpfs": [["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]],
        "ext4": [
            ["mkfs.ext4", "-q", "-F", str(image)],
            ["mount", "-o", "loop", str(image), str(mount)],
        ],
    }[kind]
    if kind == "ext4":
        image.write_bytes(bytes(6 << 20))
    return shutil.which(commands[0][0]) is not None and not any(
        subprocess.run(command, capture_output=True).returncode for command in commands
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("kind", SMALL_FILE_SYSTEMS)
def test_a_full_disk_stops_the_writer_and_loses_nothing(tmp_path: Path, kind: str) -> None:
    mount = tmp_path / "small"
    if not mounted(mount, kind):
        pytest.skip(f"{kind} cannot be mounted here")
    try:
        root, ledger, report = new_buffer(mount / "buffer"), Ledger(), CrashReport()
        ballast = 1_200_000 if kind == "tmpfs" else shutil.disk_usage(mount).free - 900_000
        (mount / "ballast").write_bytes(bytes(ballast))
        with pytest.raises(OSError, match=r"(?i)no space left"):
            write_steps(root, 0, 10_000, Disk(), ledger.note)
        assert ledger.groups
        (mount / "ballast").unlink()
        check_promises(root, 1, ledger, report)
        assert losses(report) == NOTHING_LOST, str(report)
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            BufferWriter(root, attempt=2)
        last = BufferReader(root).committed_steps()[-1]
        assert len(BufferReader(root).batch(last).read([0])) == 1
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


# --- bytes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    root = new_buffer(tmp_path / "buffer")
    write_steps(root, 0, 1, Disk(durable=False), lambda line: None)
    return root


def commit_says(path: Path, original: dict[str, object]) -> bool:
    """Whether the file still gives the very commit; damage must raise."""
    try:
        return read_commit(RolloutBuffer.open(path.parent.parent).layout, 0) == original
    except BufferCorruptError:
        return True


def test_every_prefix_and_every_flipped_byte_of_a_commit_is_refused_or_harmless(
    committed: Path,
) -> None:
    path = committed / "steps/000000.json"
    data, original = path.read_bytes(), json.loads(path.read_bytes())
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert commit_says(path, original), size
    for place in range(len(data)):
        for flip in (1, 0x80):
            path.write_bytes(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
            assert commit_says(path, original), place


def test_every_prefix_and_every_flipped_byte_of_a_journal_gives_only_whole_groups(
    tmp_path: Path,
) -> None:
    path = tmp_path / "step-000000.worker-0000.log"
    journal, sizes = Journal(path, SCHEMA, {}, Disk(durable=False)), []
    wanted = [make_group(SCHEMA, group_id, size=1, prompt=2, response=1) for group_id in range(3)]
    for group in wanted:
        journal.write_group(group, 0)
        sizes.append(path.stat().st_size)
    journal.close()
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        got = [record.group for record in replay(path, SCHEMA).records]
        assert same_groups(got, wanted[: sum(edge <= size for edge in sizes)]), size  # type: ignore[arg-type]
    edges = [0, *sizes]
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        got = [record.group for record in replay(path, SCHEMA).records]
        kept = [
            group
            for group, start, stop in zip(wanted, edges, edges[1:], strict=False)
            if not start <= place < stop
        ]
        # the first frame is the header, in front of the first group
        assert same_groups(got, kept) or (place < sizes[0] and same_groups(got, wanted)), place  # type: ignore[arg-type]


def test_a_cut_segment_of_any_length_and_a_segment_with_any_flipped_byte_is_told_from_its_commit(
    committed: Path,
) -> None:
    from vime_hpc.buffer.verify import verify_segment

    entry = read_commit(RolloutBuffer.open(committed).layout, 0)["workers"][0]["segment"]
    path = committed / entry["file"]
    data, layout, rng = path.read_bytes(), RolloutBuffer.open(committed).layout, random.Random(0)
    commit = read_commit(layout, 0)
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(BufferCorruptError, match="bytes"):
            StepBatch.from_commit(committed, commit)
    for place in rng.sample(range(len(data)), 60):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert any(finding.kind == "damage" for finding in verify_segment(layout, 0, entry)), place


def test_reading_a_segment_with_flipped_bytes_gives_the_right_samples_or_an_error(
    committed: Path,
) -> None:
    """At the level of HDF5, past the size check: in a process of its own, so that a crash of the library would show."""
    out = subprocess.run(
        [sys.executable, "-c", FLIPS, str(committed), "200"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert out.returncode == 0, out.stderr
    refused, unharmed = map(int, out.stdout.split())
    assert refused > 40
    assert refused + unharmed == 200


FLIPS = """
import random, sys
from pathlib import Path
from vime_hpc.testing.buffer_crash import flip_segment_bytes
print(*flip_segment_bytes(Path(sys.argv[1]), int(sys.argv[2]), seed=0))
"""


# --- power loss ---------------------------------------------------------------------------------------------------------

WRITER = """
import os, sys
from pathlib import Path
from vime_hpc.buffer.files import Disk
from vime_hpc.testing.buffer_crash import write_steps
acknowledged = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
for attempt in (0, 1):
    write_steps(Path(sys.argv[1]), attempt, 1 + attempt, Disk(), lambda line: os.write(acknowledged, line.encode() + b"\\n"))
"""


def can_trace() -> bool:
    """Whether strace is here and the kernel lets it look."""
    return (
        shutil.which("strace") is not None
        and subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode
        == 0
    )


@pytest.mark.skipif(not can_trace(), reason="records with strace")
def test_power_loss_at_any_call_with_any_unsynced_sectors_and_names_dropped_loses_nothing(
    tmp_path: Path,
) -> None:
    work = tmp_path / "work"
    (work / "buffer").mkdir(parents=True)
    RolloutBuffer.create(work / "buffer", run_id="crash", schema=SCHEMA)
    start = sorted(work.rglob("*"))
    images = {path: path.read_bytes() for path in start if path.is_file()}
    events = record(
        [sys.executable, "-c", WRITER, str(work / "buffer"), str(work / "acks")],
        work,
        tmp_path / "trace",
    )
    assert sum(event.call == "sync" for event in events) > 20
    device, ledger, rng, lost = Replay(work), Ledger(), random.Random(3), CrashReport()
    for path in start:
        device.create_durable(str(path), images.get(path))
    points = sorted(rng.sample(range(len(events)), 110))
    for number, event in enumerate(events):
        device.apply(event)
        if event.path == str(work / "acks") and event.call == "write":
            ledger.note(event.data.decode())
        if points and number == points[0]:
            points.pop(0)
            image = tmp_path / f"image-{number}"
            device.crash(image, rng)
            check_promises(image / "buffer", 9, ledger, lost)
            assert losses(lost) == NOTHING_LOST, (number, event.call, event.path, str(lost))
            shutil.rmtree(image)
    assert ledger.committed == {0, 1}


@pytest.mark.skipif(not can_trace(), reason="records with strace")
def test_the_recorded_model_notices_a_writer_that_does_not_sync(tmp_path: Path) -> None:
    """The yardstick itself: without fsync the same check must find losses."""
    work = tmp_path / "work"
    (work / "buffer").mkdir(parents=True)
    RolloutBuffer.create(work / "buffer", run_id="crash", schema=SCHEMA)
    start = sorted(work.rglob("*"))
    images = {path: path.read_bytes() for path in start if path.is_file()}
    careless = WRITER.replace("Disk()", "Disk(durable=False)")
    events = record(
        [sys.executable, "-c", careless, str(work / "buffer"), str(work / "acks")],
        work,
        tmp_path / "trace",
    )
    device, ledger = Replay(work), Ledger()
    for path in start:
        device.create_durable(str(path), images.get(path))
    for event in events:
        device.apply(event)
        if event.path == str(work / "acks") and event.call == "write":
            ledger.note(event.data.decode())
    found = 0
    for seed in range(8):
        image, report = tmp_path / f"image-{seed}", CrashReport()
        device.crash(image, random.Random(seed))
        try:
            check_promises(image / "buffer", 9, ledger, report)
        except BufferCorruptError:
            found += 1
        else:
            found += losses(report) != NOTHING_LOST
    assert found > 0


def test_reading_the_flipped_segment_back_to_its_bytes_is_good_again(committed: Path) -> None:
    path = (
        committed
        / read_commit(RolloutBuffer.open(committed).layout, 0)["workers"][0]["segment"]["file"]
    )
    file = SegmentFile(path)
    wanted = [
        sample for group_id in groups_of(0) for sample in make_group(SCHEMA, group_id).samples
    ]
    assert all(map(same_sample, file.read(0, len(wanted)), wanted))

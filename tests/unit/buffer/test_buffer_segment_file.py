"""A sealed segment is an ordinary HDF5 file, reads only what is asked for, and refuses tricks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from vime_hpc.buffer.codec import pack_sample
from vime_hpc.buffer.measuring import make_groups
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.segment_reader import SegmentFile, coalesce
from vime_hpc.buffer.segment_writer import write_segment
from vime_hpc.errors import BufferCorruptError
from vime_hpc.testing.buffer_suite import make_sample

MOE = BufferSchema(RoutingShape(num_layers=4, top_k=2, num_experts=8), optional=("values",))


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "segments" / "step-000000" / "worker-0000.e0000.h5"
    path.parent.mkdir(parents=True)
    samples = [
        pack_sample(MOE, make_sample(MOE, group, index)) for group in range(5) for index in range(2)
    ]
    write_segment(path, MOE, samples, {"run_id": "r", "step": 0})
    return path


def test_no_dataset_is_variable_length_chunked_filtered_or_of_objects(segment: Path) -> None:
    """Cases C59 and C66."""
    with h5py.File(segment, "r") as file:
        datasets = list(file.values())
        assert len(datasets) > 30
        for dataset in datasets:
            assert dataset.dtype.kind in "iuf"
            assert dataset.chunks is None
            assert dataset.id.get_create_plist().get_nfilters() == 0
        assert (
            file.id.get_create_plist().get_version()[0] == 0
        )  # superblock 0: any HDF5 library since 1.6 opens it


def test_the_file_opens_where_no_plugin_can_be_loaded(segment: Path) -> None:
    """Case C66."""
    code = f"import h5py; f = h5py.File({str(segment)!r}); print(sum(len(d[()]) for d in f.values() if d.shape[0]) > 0)"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HDF5_PLUGIN_PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert out.stdout.strip() == "True", out.stderr


def test_chosen_layers_are_the_same_columns_of_the_whole(segment: Path) -> None:
    file = SegmentFile(segment)
    whole = file.read(0, 10)
    for first, last in [(0, 1), (1, 3), (3, 4)]:
        part = file.read(2, 5, layers=slice(first, last))
        for sample, full in zip(part, whole[2:5], strict=True):
            assert np.array_equal(
                sample.routed_experts, full.routed_experts[:, first * 2 : last * 2]
            )  # type: ignore[index,arg-type]


def test_reading_a_few_samples_and_layers_touches_only_their_bytes(tmp_path: Path) -> None:
    schema = BufferSchema(RoutingShape(num_layers=48, top_k=8, num_experts=128))
    path = tmp_path / "big.h5"
    samples = [
        pack_sample(schema, make_sample(schema, group, 0, prompt=500, response=1500))
        for group in range(16)
    ]
    write_segment(path, schema, samples, {"run_id": "r", "step": 0})
    file = SegmentFile(path)
    file.read(0, 1, layers=slice(0, 1))  # opens and caches offsets and digests
    before = _bytes_read()
    file.read(3, 5, layers=slice(4, 7))
    wanted = 2 * (1999 * 8 * 3 + 2000 * 4 + 1500 * 5)
    assert wanted <= _bytes_read() - before <= 1.2 * wanted + 64_000
    assert 1.2 * wanted + 64_000 < path.stat().st_size / 50


FORKING_READER = """
import os, sys
from pathlib import Path
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.testing.buffer_suite import same_sample

file = SegmentFile(Path(sys.argv[1]))
first = file.read(0, 2)
children = []
for _ in range(3):
    if (child := os.fork()) == 0:
        os._exit(0 if all(map(same_sample, file.read(0, 2), first)) else 1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0, 0, 0], codes
assert all(map(same_sample, file.read(0, 2), first))
"""


def test_a_forked_process_reads_through_its_own_handle(segment: Path) -> None:
    # From a program of its own: a fork of the test process could inherit a lock that another thread of it holds.
    subprocess.run([sys.executable, "-c", FORKING_READER, str(segment)], check=True, timeout=120)


def test_a_link_to_another_file_is_refused(segment: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["tokens"] = np.zeros(90, "<i4")
    with h5py.File(segment, "r+") as file:
        del file["tokens"]
        file["tokens"] = h5py.ExternalLink(str(secret), "/tokens")
    with pytest.raises(BufferCorruptError, match="'tokens' is a link to another place"):
        SegmentFile(segment)


def test_data_kept_outside_the_file_is_refused(segment: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    outside.write_bytes(bytes(360))
    with h5py.File(segment, "r+") as file:
        size = len(file["tokens"])
        del file["tokens"]
        file.create_dataset(
            "tokens", shape=(size,), dtype="<i4", external=[(str(outside), 0, size * 4)]
        )
    with pytest.raises(BufferCorruptError, match="keeps its data in another file"):
        SegmentFile(segment).read(0, 1)


def test_reading_works_while_another_process_holds_the_file_open_for_writing(segment: Path) -> None:
    """Case C58."""
    code = f"import h5py, sys; f = h5py.File({str(segment)!r}, 'r+'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "open"
        assert len(SegmentFile(segment).read(0, 10)) == 10
        holder.communicate("")


def test_writing_and_reading_take_no_file_lock_at_all(tmp_path: Path, segment: Path) -> None:
    """Case C58: what asks for no lock cannot fail for want of a lock service."""
    code = f"""
from pathlib import Path
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.buffer.segment_writer import write_segment
from vime_hpc.buffer.schema import BufferSchema
write_segment(Path({str(tmp_path / "new.h5")!r}), BufferSchema(), [], {{"run_id": "r"}})
SegmentFile(Path({str(segment)!r})).read(0, 10)
"""
    environment = {
        name: value for name, value in os.environ.items() if name != "HDF5_USE_FILE_LOCKING"
    }
    trace = tmp_path / "trace"
    subprocess.run(
        ["strace", "-f", "-e", "trace=flock,fcntl", "-o", str(trace), sys.executable, "-c", code],
        env=environment,
        check=True,
    )
    assert not [
        line for line in trace.read_text().splitlines() if "flock(" in line or "F_SETLK" in line
    ]


def test_neighbouring_rows_become_one_read() -> None:
    assert coalesce([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
    assert coalesce([]) == []


def test_the_file_says_what_it_is_in_plain_attributes(segment: Path) -> None:
    with h5py.File(segment, "r") as file:
        assert file.attrs["format"] == b"vime-hpc rollout segment"
        assert file.attrs["format_version"] == 1
        assert file.attrs["sampling_temperature"] == 1.0
        assert file["tokens"].attrs["units"] == b"token id"
        assert file["tokens"].dims[0][0].name == "/token"


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_routed_experts_of_several_batches_are_read_back_by_hdf5_itself(tmp_path: Path) -> None:
    """They are written past HDF5, at the place it has given them; nothing it keeps may come over them."""
    schema = BufferSchema(RoutingShape(num_layers=48, top_k=8, num_experts=128))
    (group,) = make_groups(schema, num_groups=1, prompt=10_000, response=15_000, group_size=4)
    path = tmp_path / "segment.h5"
    packed = [pack_sample(schema, sample) for sample in group.samples]
    write_segment(path, schema, packed, {"run_id": "r", "step": 0})
    assert sum(sample.routed.nbytes for sample in packed) > 2 * 16 << 20  # three batches at least
    with h5py.File(path) as file:
        stored = file["routed_experts"][:].transpose(1, 0, 2)
    expected = np.concatenate([sample.routed for sample in packed])
    assert np.array_equal(stored, expected)


def test_a_system_that_writes_less_than_asked_for_makes_the_same_file(
    tmp_path: Path, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, sizes = os.pwrite, []

    def short(descriptor: int, data: memoryview, offset: int) -> int:
        sizes.append(whole(descriptor, data[:7], offset))
        return sizes[-1]

    monkeypatch.setattr(os, "pwrite", short)
    samples = [
        pack_sample(MOE, make_sample(MOE, group, index)) for group in range(5) for index in range(2)
    ]
    write_segment(tmp_path / "short.h5", MOE, samples, {"run_id": "r", "step": 0})
    assert sum(sizes) == sum(sample.routed.nbytes for sample in samples) > 7
    assert (tmp_path / "short.h5").read_bytes() == segment.read_bytes()

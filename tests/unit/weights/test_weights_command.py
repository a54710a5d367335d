"""`vime-hpc weights` on versions, Hugging Face directories and checkpoints, in a Python that has no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from vime_hpc.weights.delta import encode
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.plan import Placed
from vime_hpc.weights.version_directory import (
    VersionReader,
    folder_of,
    prune,
    read_manifest,
    versions_in,
)
from vime_hpc.weights.version_writer import Files, commit, write_delta, write_version

MAIN = "import sys; sys.modules['torch'] = None\nfrom vime_hpc.cli.main import main\nsys.exit(main(sys.argv[1:]))"
NAMES = ("a.weight", "b.weight", "c.steps")


def call(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-c", MAIN, "weights", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def bfloat16(values: Any) -> np.ndarray[Any, Any]:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def tensors(version: int) -> dict[str, tuple[Placed, np.ndarray[Any, Any]]]:
    values = np.ones(4000, np.float32)
    values[: 10 * version] = 1.5
    return {
        "a.weight": (Placed("a.weight", "bfloat16", (40, 100), 0), bfloat16(values)),
        "b.weight": (Placed("b.weight", "float32", (3,), 0), np.zeros(12, np.uint8)),
        "c.steps": (Placed("c.steps", "int64", (1,), 0), np.array([version]).view(np.uint8)),
    }


def write(root: Path, version: int, base: int | None = None) -> Path:
    """A full version, or one of changes over `base`."""
    folder = folder_of(root, version)
    if base is None:
        write_version(Files(fsync=False), folder, version, tensors(version))
        return folder
    folder.mkdir()
    old, new = tensors(base), tensors(version)
    changes = []
    for name in NAMES:
        placed, data = new[name]
        before, after = (tensor_digest(d, placed.dtype, placed.shape) for d in (old[name][1], data))
        size = 2 if name == "a.weight" else 4 if name == "b.weight" else 8
        changes.append((placed, before, after, encode(old[name][1], data, size)))
    files = Files(fsync=False)
    shard = write_delta(files, folder, "job-s000", base, changes)
    commit(files, folder, version, [shard], read_manifest(folder_of(root, base)).root)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with versions 1 (full), 2 and 3 (deltas)."""
    root = tmp_path / "run" / "weights"
    root.mkdir(parents=True)
    write(root, 1)
    write(root, 2, base=1)
    write(root, 3, base=2)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "tiny", "torch_dtype": "float32"}')
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": {"path": str(model)}}))
    return tmp_path / "run"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_ls_lists_versions_with_kind_base_and_root_and_names_an_unfinished_one(run: Path) -> None:
    code, out, _ = call("ls", run, "--json")
    rows = json.loads(out)["versions"]
    assert code == 0
    assert [(r["version"], r["kind"], r["base_version"]) for r in rows] == [
        (1, "full", None),
        (2, "delta", 1),
        (3, "delta", 2),
    ]
    assert rows[2]["base_root"] == rows[1]["root"]
    (run / "weights" / "v000003" / "version.json").unlink()
    code, out, _ = call("ls", run / "weights")
    assert code == 0  # nobody reads it: it is not a version yet
    assert "v000003 UNUSABLE" in out
    assert "v000003: unfinished" in call("verify", run)[1]
    assert call("verify", run / "weights" / "v000003")[0] == 3


def test_verify_is_good_or_names_file_and_tensor_with_both_digests(run: Path) -> None:
    assert call("verify", run)[0] == 0
    piece = read_manifest(run / "weights" / "v000002").tensors["a.weight"]
    flip(run / "weights" / "v000002" / piece.file, piece.offset + piece.nbytes - 1)
    code, out, _ = call("verify", run, "--json")
    (good, bad, later) = json.loads(out)["checked"]
    assert (code, good["problems"]) == (3, [])
    assert len(bad["problems"]) == 1
    (problem,) = bad["problems"]
    assert f"v000002/{piece.file}, tensor a.weight: found digest" in problem
    assert f"expected {piece.digest}" in problem
    assert later["problems"] == [problem]  # what builds on it is wrong for the same reason


def test_verify_names_a_short_file_and_a_changed_header(run: Path) -> None:
    (file,) = (run / "weights" / "v000001").glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    code, out, _ = call("verify", run / "weights" / "v000001")
    assert code == 3
    assert f"{file}: {len(data) - 1} bytes, version.json says {len(data)} bytes" in out
    file.write_bytes(data.replace(b"[40,100]", b"[100,40]"))
    code, out, _ = call("verify", run / "weights" / "v000001")
    assert code == 3
    assert "does not say of a.weight" in out


def test_diff_says_tensors_share_of_bytes_and_the_largest_difference_of_bfloat16(run: Path) -> None:
    left, right = run / "weights" / "v000001", run / "weights" / "v000003"
    code, out, _ = call("diff", left, right, "--json")
    found = json.loads(out)
    assert code == 1
    assert [d["name"] for d in found["differences"]] == ["a.weight", "c.steps"]
    a, c = found["differences"]
    assert (a["changed_bytes"], a["nbytes"], a["max_abs"]) == (20, 8000, 0.5)  # 0x3f80 → 0x3fc0
    assert (c["changed_bytes"], c["max_abs"]) == (1, None)
    assert found["share_of_bytes_changed"] == 21 / 8020
    assert call("diff", left, left)[0] == 0


def test_apply_makes_the_full_version_of_a_delta_and_refuses_another_base(
    run: Path, tmp_path: Path
) -> None:
    root = run / "weights"
    code, out, _ = call("apply", root / "v000001", root / "v000002", tmp_path / "two")
    assert code == 0
    assert read_manifest(root / "v000002").root in out
    assert call("diff", tmp_path / "two", root / "v000002")[0] == 0
    code, _, error = call("apply", root / "v000001", root / "v000003", tmp_path / "three")
    assert code == 1
    assert "changes over version 2" in error
    assert "a.weight, c.steps differ" in error
    assert not (tmp_path / "three").exists()
    assert not list(tmp_path.glob(".*"))


def test_export_writes_a_model_directory_with_the_config_of_the_run(
    run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    assert call("export", run / "weights" / "v000003", out)[0] == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text()) == {"model_type": "tiny"}  # three types
    assert call("diff", out, run / "weights" / "v000003")[0] == 0
    assert call("verify", out)[0] == 0
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys([*NAMES, "d.weight"], "model.safetensors")})
    )
    code, text, _ = call("verify", out)
    assert code == 3
    assert "model.safetensors, tensor d.weight: model.safetensors.index.json names it" in text
    assert call("export", run / "weights" / "v000003", out)[0] == 2


def test_verify_of_a_checkpoint_names_the_file_and_its_digests(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-000001"
    call("export", run / "weights" / "v000001", folder)
    file = folder / "model.safetensors"
    digest = xxhash.xxh3_128_hexdigest(file.read_bytes())
    entry = {"name": file.name, "bytes": file.stat().st_size, "xxh3_128": digest}
    (folder / "commit.json").write_text(json.dumps({"files": [entry]}))
    assert call("verify", folder)[0] == 0
    flip(file, -1)
    code, out, _ = call("verify", folder)
    assert code == 3
    assert f"{file}: found digest" in out
    assert f"expected {digest}" in out


def test_a_run_that_keeps_no_versions_is_told_by_its_transport(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"weights": {"transport": "bridge"}}))
    (tmp_path / "export").mkdir()
    for command in ("ls", "verify"):
        code, _, said = call(command, tmp_path)
        assert code == 2
        assert 'transport = "bridge", which keeps none on disk' in said
        assert f"what it has of weights: {tmp_path / 'export'}" in said


def test_a_path_without_weights_is_a_usage_error(tmp_path: Path) -> None:
    for command in (["ls"], ["verify"], ["diff", tmp_path]):
        code, _, error = call(*command, tmp_path)
        assert code == 2
        assert "no weights here" in error


def test_pruning_keeps_what_a_kept_delta_builds_on_and_drops_versions_of_a_longer_attempt(
    run: Path,
) -> None:
    root = run / "weights"
    write(root, 4)
    write(root, 5, base=4)
    assert prune(root, newest=3, keep=1) == [4, 5]
    assert list(versions_in(root)) == [1, 2, 3]
    VersionReader(root / "v000003").check_all()
    write(root, 4)
    assert prune(root, newest=4, keep=1) == [1, 2, 3]


def test_a_file_name_that_leads_elsewhere_is_refused(run: Path) -> None:
    path = run / "weights" / "v000001" / "version.json"
    raw = json.loads(path.read_text())
    (name,) = raw["files"]
    path.write_text(path.read_text().replace(name, "../v000002/x"))
    code, out, _ = call("verify", run / "weights" / "v000001")
    assert code == 3
    assert "names files it may not: ../v000002/x" in out

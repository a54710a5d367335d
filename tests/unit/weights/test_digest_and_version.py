from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from vime_hpc.errors import CheckpointCorruptError, ConfigError, WeightsMismatchError
from vime_hpc.weights.digest import differing, refuse_unless_equal, root_digest, tensor_digest
from vime_hpc.weights.safetensors_index import tensor_specs
from vime_hpc.weights.version import NO_VERSION, VersionKeeper, WeightState


def test_a_digest_is_xxh3_128_of_type_shape_and_bytes() -> None:
    data = np.arange(6, dtype=np.float32)
    expected = xxhash.xxh3_128_hexdigest(b"float32|2,3|" + data.tobytes())
    assert tensor_digest(data, "float32", (2, 3)) == expected


def test_a_transposed_retyped_or_altered_tensor_has_another_digest() -> None:
    data = np.zeros(6, dtype=np.float32)
    base = tensor_digest(data, "float32", (2, 3))
    assert tensor_digest(data, "float32", (3, 2)) != base
    assert tensor_digest(data, "int32", (2, 3)) != base
    altered = data.view(np.uint8).copy()
    altered[17] ^= 1
    assert tensor_digest(altered, "float32", (2, 3)) != base


def test_the_root_digest_does_not_depend_on_order_but_on_every_name_and_digest() -> None:
    a = {"x": "1", "y": "2"}
    assert root_digest(a) == root_digest({"y": "2", "x": "1"})
    assert len({root_digest(a), root_digest({"x": "2", "y": "1"}), root_digest({"x": "1"})}) == 3


def test_differing_tensors_are_named_on_either_side() -> None:
    assert differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}) == [
        "b",
        "c",
        "d",
    ]
    with pytest.raises(WeightsMismatchError, match=r"version 7 .* 1 of 2 tensors differ: b"):
        refuse_unless_equal({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, where="engine 0", version=7)


def test_a_version_never_goes_back_and_a_failed_update_stays_updating() -> None:
    keeper = VersionKeeper()
    assert (keeper.version, keeper.state) == (NO_VERSION, WeightState.CLEAN)
    keeper.begin(3)
    assert keeper.state is WeightState.UPDATING
    keeper.commit(3)
    keeper.begin(3)  # the same version may be sent again, to heal an engine
    keeper.commit(3)
    with pytest.raises(WeightsMismatchError, match="never go back"):
        keeper.begin(2)
    keeper.begin(4)
    assert (keeper.version, keeper.state) == (3, WeightState.UPDATING)


def _write_safetensors(path: Path, entries: dict[str, tuple[str, list[int]]]) -> None:
    header = {n: {"dtype": d, "shape": s, "data_offsets": [0, 0]} for n, (d, s) in entries.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(("tied", "names"), [(False, {"a", "lm_head.weight"}), (True, {"a"})])
def test_a_tied_lm_head_is_not_expected(tmp_path: Path, tied: bool, names: set[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    _write_safetensors(tmp_path / "model-1.safetensors", {"a": ("BF16", [2, 3])})
    _write_safetensors(tmp_path / "model-2.safetensors", {"lm_head.weight": ("F32", [4])})
    specs = tensor_specs(tmp_path)
    assert specs.keys() == names
    assert specs["a"] == ("bfloat16", (2, 3))


def test_a_directory_without_or_with_damaged_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        tensor_specs(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointCorruptError, match="header"):
        tensor_specs(tmp_path)

"""Hugging Face -> Megatron -> Hugging Face is the identity, for engines and on disk, in every
layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_cases import make_model

from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import TrainerConfig
from vime_hpc.errors import ConfigError
from vime_hpc.testing.ranks import run_ranks
from vime_hpc.trainer.expected import expected_specs
from vime_hpc.trainer.layout import read_hf_config
from vime_hpc.weights.plan import TensorSpec
from vime_hpc.weights.safetensors_index import tensor_specs as model_specs

DENSE = [
    {},
    {"num_ranks": 2},
    {"num_ranks": 2, "tp": 2},
    {"num_ranks": 2, "pp": 2},
    {"num_ranks": 4, "tp": 2, "pp": 2},
]
MOE = [
    {},
    {"num_ranks": 2, "ep": 2},
    {"num_ranks": 4, "tp": 2, "ep": 2, "sequence_parallel": True},
    {"num_ranks": 4, "pp": 2, "ep": 2},
    {"num_ranks": 4, "ep": 2},  # two replicas of every expert
    {"num_ranks": 4, "tp": 2, "ep": 4, "sequence_parallel": True},
]
CASES = (
    [("qwen3", False, layout) for layout in DENSE]
    + [("qwen3", True, layout) for layout in DENSE[2:4]]
    + [("qwen2", False, DENSE[2]), ("llama", False, DENSE[2])]
    + [("qwen3_moe", False, layout) for layout in MOE]
)


def export(rank: int, source: Path, target: Path, layout: dict[str, Any]) -> Any:
    from vime_hpc.trainer.export import WeightExporter
    from vime_hpc.trainer.model import build_model

    exporter = WeightExporter(
        build_model(ModelConfig(path=str(source), dtype="float32"), TrainerConfig(**layout))
    )
    sent = {name: tensor.numpy().copy() for name, tensor in exporter.tensors()}
    exporter.save_hf(target)
    exporter.save_hf(target)  # replaces
    return exporter.tensor_specs(), exporter.sender_index(), sent


@pytest.mark.parametrize(("kind", "tied", "layout"), CASES)
def test_exported_tensors_are_the_loaded_ones_bit_for_bit(
    kind: str, tied: bool, layout: dict[str, Any], tmp_path: Path
) -> None:
    source = make_model(tmp_path / "source", kind=kind, tied=tied, vocab=251)
    original = load_file(source / "model.safetensors")
    ranks = run_ranks(
        export, layout.get("num_ranks", 1), source, tmp_path / "out", layout, megatron=True
    )

    specs = ranks[0][0]
    assert all(rank_specs == specs for rank_specs, _, _ in ranks), "the plan differs between ranks"
    shapes = {name: shape for name, (_, shape) in model_specs(source).items()}
    expected = expected_specs(shapes, read_hf_config(source), TrainerConfig(**layout), "float32")
    assert [TensorSpec(*spec) for spec in specs] == expected, "`vime-hpc plan` shows another plan"
    senders = [index for _, index, _ in ranks if index is not None]
    assert sorted(senders) == list(range(layout.get("pp", 1) * layout.get("ep", 1)))
    for _, index, sent in ranks:
        assert sent == {} or index is not None
        mine = [spec for spec in specs if spec[3] == index]
        assert list(sent) == [spec[0] for spec in mine], "order differs from the plan"
        for name, dtype, shape, _ in mine:
            assert sent[name].shape == shape
            assert str(sent[name].dtype) == dtype
            assert torch.equal(torch.from_numpy(sent[name]), original[name]), name
    assert {spec[0] for spec in specs} == set(original)

    written = {
        name: tensor
        for file in (tmp_path / "out").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [], (
        "something was left beside the export"
    )


def test_transformers_loads_the_export_of_two_pipeline_stages(tmp_path: Path) -> None:
    import transformers

    source = make_model(tmp_path / "source")
    run_ranks(export, 2, source, tmp_path / "out", {"num_ranks": 2, "pp": 2}, megatron=True)
    a, b = (
        transformers.AutoModelForCausalLM.from_pretrained(p) for p in (source, tmp_path / "out")
    )
    tokens = torch.arange(20)[None]
    assert torch.equal(a(tokens).logits, b(tokens).logits)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "model.safetensors").unlink(), "expected model.safetensors"),
        (lambda p: edit(p / "config.json", num_hidden_layers=5), r"no tensor 'model\.layers\.4"),
        (
            lambda p: edit(p / "config.json", intermediate_size=80),
            r"gate_proj.*\(192, 64\).*asks for \(160, 64\)",
        ),
    ],
)
def test_a_model_directory_that_does_not_fit_together_is_refused(
    damage: Any, message: str, tmp_path: Path
) -> None:
    source = make_model(tmp_path / "source")
    damage(source)

    def refused(rank: int) -> str:
        from vime_hpc.trainer.model import build_model

        with pytest.raises(ConfigError) as error:
            build_model(ModelConfig(path=str(source), dtype="float32"), TrainerConfig())
        return str(error.value)

    import re

    text = run_ranks(refused, 1, megatron=True)[0]
    assert re.search(message, text), text


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

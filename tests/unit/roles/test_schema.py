"""What a run's buffer holds follows from its configuration, never from its samples, and does not change between starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from vime_hpc.buffer.columns import OPTIONAL
from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cli.preflight import check
from vime_hpc.config.load import load_config
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError, DamagedDataError
from vime_hpc.launch.run_directory import claimed
from vime_hpc.roles.schema import buffer_schema
from vime_hpc.testing.buffer_suite import make_group, same_sample

NAMES = [column.name for column in OPTIONAL]


def config(*options: str) -> RunConfig:
    return load_config([], ["--model.path=m", "--data.train=t", *options])


def test_the_schema_is_what_the_configuration_says() -> None:
    assert buffer_schema(config()) == BufferSchema()
    named = buffer_schema(config(f"--buffer.columns={NAMES}", "--rollout.temperature=0.5"))
    assert named == BufferSchema(optional=tuple(NAMES), sampling_temperature=0.5)
    pair = buffer_schema(config("--buffer.columns=['top_p_token_ids']"))
    assert pair.optional == ("top_p_token_offsets", "top_p_token_ids")


def test_a_column_nobody_knows_is_refused_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, '
        '"num_hidden_layers": 2, "intermediate_size": 128}'
    )
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    wrong = config("--buffer.columns=['valeus']", f"--model.path={tmp_path}")
    with pytest.raises(ConfigError, match=r"'valeus' is no optional column.*known: old_logprobs"):
        check(wrong, import_plugins=False)


def test_the_first_sample_of_a_run_decides_nothing(tmp_path: Path) -> None:
    """It has no optional column; later ones of the same step, and none at all of the next step, have some."""
    full = BufferSchema(optional=tuple(NAMES))
    schema = buffer_schema(config(f"--buffer.columns={NAMES}"))
    without, some = make_group(BufferSchema(), 0), make_group(full, 1)
    steps = [[without, some], [make_group(BufferSchema(), 2)]]
    buffer = RolloutBuffer.create(tmp_path, run_id="r", schema=schema, durable=False)
    with BufferWriter(tmp_path, durable=False) as sink:
        for step, groups in enumerate(steps):
            for group in groups:
                sink.journal_group(step, group)
            sink.append(step, groups, resume_state={}, stats={})
    for step, groups in enumerate(steps):
        wanted = [sample for group in groups for sample in group.samples]
        read = [sample for _, sample in buffer.samples(step, step)]
        assert all(same_sample(*pair) for pair in zip(read, wanted, strict=True))
        with h5py.File(buffer.layout.segment(step, 0, 0)) as file:
            assert set(NAMES) <= set(file)
            assert file["values_present"][:].tolist() == [0, 0, 1, 1][: len(wanted)]


def test_a_sample_with_a_column_that_is_not_declared_stops_the_run_and_says_how_to_declare_it(
    tmp_path: Path,
) -> None:
    schema = buffer_schema(config("--buffer.columns=['trace']"))
    RolloutBuffer.create(tmp_path, run_id="r", schema=schema, durable=False)
    group = make_group(schema, 0)
    extra = {**group.samples[1].columns, "values": np.zeros(4, np.float32)}
    group = replace(group, samples=(group.samples[0], replace(group.samples[1], columns=extra)))
    with (
        BufferWriter(tmp_path, durable=False) as sink,
        pytest.raises(DamagedDataError, match=r"--buffer.columns=\['trace', 'values'\]") as refused,
    ):
        sink.journal_group(0, group)
    assert refused.value.exit_code == 3


def test_a_resumed_run_with_other_columns_is_refused_before_anything_starts(tmp_path: Path) -> None:
    first = config(f"--run.dir={tmp_path / 'run'}", "--buffer.columns=['trace']")
    with claimed(first, "local", 0) as paths:
        RolloutBuffer.create(paths.buffer, run_id="r", schema=buffer_schema(first), durable=False)
    for other in ("[]", "['trace','values']"):
        changed = config(f"--run.dir={tmp_path / 'run'}", f"--buffer.columns={other}")
        with (
            pytest.raises(ConfigError, match=r"buffer.columns was .*'trace'.*--run.dir") as refused,
            claimed(changed, "local", 1),
        ):
            pass
        assert refused.value.exit_code == 2
        with pytest.raises(ConfigError, match=r"'trace'.*needs a new run directory"):
            RolloutBuffer.create(
                paths.buffer, run_id="r", schema=buffer_schema(changed), durable=False
            )


def test_texts_are_left_out_where_the_configuration_says_so(tmp_path: Path) -> None:
    buffer = RolloutBuffer.create(tmp_path, run_id="r", durable=False)
    group = make_group(BufferSchema(), 1)
    with BufferWriter(tmp_path, durable=False, store_text=False) as sink:
        sink.journal_group(0, group)
        sink.append(0, [group], resume_state={}, stats={})
    read = [sample for _, sample in buffer.samples()]
    assert [(s.prompt_text, s.response_text) for s in read] == [("", "")] * 2
    assert [s.tokens.tolist() for s in read] == [s.tokens.tolist() for s in group.samples]

"""Prompt files and the order they are handed out in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vime_hpc.config.data import DataConfig
from vime_hpc.errors import ConfigError, PromptDataError
from vime_hpc.rollout.prompt_file import read_prompt_file
from vime_hpc.rollout.seeds import request_seed
from vime_hpc.rollout.source import PromptSet, PromptSource, load_prompts
from vime_hpc.rollout.tiny_policy import byte_tokenizer
from vime_hpc.rollout.tokenizer import PromptTokenizer, load_tokenizer
from vime_hpc.types import Prompt


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(byte_tokenizer())


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def load(path: str, tokenizer: PromptTokenizer, **options: Any) -> PromptSet:
    return load_prompts(path, DataConfig(train=path, **options), tokenizer)


def test_a_broken_line_is_refused_by_its_physical_number(tmp_path: Path) -> None:
    """Case C42."""
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}', "", '{"prompt": "x"', '{"prompt": "y"}')
    with pytest.raises(PromptDataError, match=r"a\.jsonl, line 3: not valid JSON"):
        read_prompt_file(path)


def test_skipping_bad_lines_is_opt_in_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenizer: PromptTokenizer
) -> None:
    """Case C42."""
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}', "", '{"prompt": "x"', '{"prompt": "y"}')
    prompts = load(path, tokenizer, skip_bad_lines=True)
    assert len(prompts) == 2
    assert "1 line skipped" in caplog.text


def test_a_missing_prompt_key_names_the_keys_and_the_line(
    tmp_path: Path, tokenizer: PromptTokenizer
) -> None:
    path = write(tmp_path / "a.jsonl", "", '{"question": "x", "answer": "1"}')
    with pytest.raises(
        PromptDataError, match=r"line 2: the record has no key 'prompt'.*'answer', 'question'"
    ):
        load(path, tokenizer)


@pytest.mark.parametrize("value", [[], [{"role": "user"}], 3, ["x"]])
def test_a_prompt_that_is_no_text_and_no_message_list_is_refused(
    value: Any, tmp_path: Path, tokenizer: PromptTokenizer
) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": value}))
    with pytest.raises(PromptDataError, match=r"line 1: .*role, content"):
        load(path, tokenizer)


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such prompt file"):
        read_prompt_file(tmp_path / "none.jsonl")


def test_other_damage_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x"}\n\xff\xfe\n')
    with pytest.raises(PromptDataError, match="line 2: not UTF-8"):
        read_prompt_file(tmp_path / "a.jsonl")
    with pytest.raises(PromptDataError, match="line 1: a list"):
        read_prompt_file(write(tmp_path / "b.jsonl", "[1]"))
    with pytest.raises(PromptDataError, match="no prompt records"):
        read_prompt_file(write(tmp_path / "c.jsonl", "", ""))


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_prompt_file(path).records == [(1, {"prompt": "a\u2028b"})]


def test_parquet_gives_the_same_prompts_as_its_jsonl_twin(
    tmp_path: Path, tokenizer: PromptTokenizer
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    rows = [
        {
            "prompt": [{"role": "user", "content": f"n{i}"}],
            "label": str(i),
            "tools": [{"name": "t"}],
        }
        for i in range(3)
    ]
    write(tmp_path / "a.jsonl", *map(json.dumps, rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    one, two = (
        load(str(tmp_path / "a.jsonl"), tokenizer),
        load(str(tmp_path / "a.parquet"), tokenizer),
    )
    assert one.digest == two.digest
    assert [p.text for p in one.prompts] == [p.text for p in two.prompts]


def test_long_prompts_are_left_out_and_counted(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    path = write(
        tmp_path / "a.jsonl", '{"prompt": "x"}', json.dumps({"prompt": "y" * 50}), '{"prompt": "z"}'
    )
    prompts = load(path, tokenizer, max_prompt_tokens=10)
    assert [p.prompt_id for p in prompts.prompts] == [0, 2]
    assert prompts.num_too_long == 1


@pytest.mark.parametrize(
    "template", ["<s>{{ messages[0].content }}", "<s><s>{{ messages[0].content }}"]
)
def test_prompts_have_exactly_one_bos(template: str) -> None:
    from tokenizers import processors

    hf = byte_tokenizer()
    hf.add_special_tokens({"bos_token": "<s>"})
    hf.chat_template = template
    bos = hf.bos_token_id
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    tokenizer = PromptTokenizer(hf)
    rendered = tokenizer.encode_rendered(tokenizer.render([{"role": "user", "content": "a"}]))
    assert rendered.tolist() == [bos, 97]
    assert tokenizer.encode_plain("a").tolist() == [bos, 97]
    assert tokenizer.encode_plain("<s>a").tolist() == [bos, 97]
    assert tokenizer.num_leading_bos(
        template.replace("{{ messages[0].content }}", "a")
    ) == template.count("<s>")


def test_a_tokenizer_that_cannot_do_what_is_asked_says_so(tmp_path: Path) -> None:
    hf = byte_tokenizer()
    hf.chat_template = None
    with pytest.raises(ConfigError, match="no chat_template"):
        PromptTokenizer(hf).render([{"role": "user", "content": "a"}])
    with pytest.raises(ConfigError, match="no such directory"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)


@pytest.fixture
def make_source() -> Callable[..., PromptSource]:
    def make(count: int = 7, **options: Any) -> PromptSource:
        prompts = tuple(Prompt(i, np.array([i], dtype=np.int32), str(i)) for i in range(count))
        return PromptSource(
            PromptSet(prompts, count, 0, 0, f"digest{count}"),
            **{"seed": 1, "group_size": 2, **options},
        )

    return make


def take(source: PromptSource, count: int) -> list[tuple[int, int]]:
    requests = [source.next_request() for _ in range(count)]
    return [(r.group_id, r.prompt.prompt_id) for r in requests]


def test_every_epoch_has_every_prompt_once_in_another_order(
    make_source: Callable[..., PromptSource],
) -> None:
    order = [prompt for _, prompt in take(make_source(), 21)]
    epochs = [order[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_follows_from_the_seed_alone(make_source: Callable[..., PromptSource]) -> None:
    assert take(make_source(), 14) == take(make_source(), 14)
    assert take(make_source(seed=2), 14) != take(make_source(), 14)
    assert [p for _, p in take(make_source(shuffle=False), 8)] == [0, 1, 2, 3, 4, 5, 6, 0]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 9), first=st.integers(0, 30), more=st.integers(1, 30))
def test_a_restored_source_goes_on_exactly(count: int, first: int, more: int) -> None:
    prompts = tuple(Prompt(i, np.array([i], dtype=np.int32), str(i)) for i in range(count))
    data = PromptSet(prompts, count, 0, 0, "d")
    one = PromptSource(data, seed=3, group_size=2)
    take(one, first)
    two = PromptSource(data, seed=3, group_size=2)
    two.restore(json.loads(json.dumps(one.state())))
    assert take(one, more) == take(two, more)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"seed": 2}, "run.seed"),
        ({"count": 8}, "data.train"),
        ({"shuffle": False}, "data.shuffle"),
    ],
)
def test_a_state_of_something_else_is_refused(
    make_source: Callable[..., PromptSource], other: dict[str, Any], named: str
) -> None:
    state = make_source().state()
    with pytest.raises(ConfigError, match=named):
        make_source(**other).restore(state)


def test_workers_share_out_one_common_order(make_source: Callable[..., PromptSource]) -> None:
    alone = dict(take(make_source(), 12))
    parts = [take(make_source(worker=w, num_workers=3), 4) for w in range(3)]
    assert dict(pair for part in parts for pair in part) == alone
    source = make_source(worker=1, num_workers=3)
    source.rewind(5)
    assert source.next_request().group_id == 7


def test_the_state_of_one_worker_of_two_is_not_enough_for_another_number(
    make_source: Callable[..., PromptSource],
) -> None:
    state = make_source(worker=0, num_workers=2).state()
    with pytest.raises(ConfigError, match=r"rollout.num_workers was 2 and is now 1"):
        make_source().restore(state)


@settings(max_examples=80, deadline=None)
@given(old=st.integers(1, 4), new=st.integers(1, 4), later=st.integers(1, 3), data=st.data())
def test_another_number_of_workers_loses_no_group_and_repeats_none(
    old: int, new: int, later: int, data: st.DataObject
) -> None:
    prompts = PromptSet(
        tuple(Prompt(i, np.array([i], dtype=np.int32), str(i)) for i in range(5)), 5, 0, 0, "d"
    )
    used: list[int] = []
    states: list[dict[str, Any]] = []
    for count in (old, new, later):
        sources = [
            PromptSource(prompts, seed=1, group_size=2, worker=w, num_workers=count)
            for w in range(count)
        ]
        for source in sources:
            if states:
                source.restore(states)
            used += [group for group, _ in take(source, data.draw(st.integers(0, 6)))]
        states = json.loads(json.dumps([source.state() for source in sources]))
    last = PromptSource(prompts, seed=1, group_size=2)
    last.restore(states)
    used += [group for group, _ in take(last, 40)]
    assert sorted(used) == list(range(len(used)))


def test_seeds_differ_in_every_part_and_fit_the_engine() -> None:
    base: dict[str, Any] = {"step": 0, "group_id": 0, "index_in_group": 0, "attempt": 0, "turn": 0}
    seeds = {
        request_seed(1, **base),
        request_seed(2, **base),
        request_seed(1, **base, purpose="eval"),
    }
    seeds |= {request_seed(1, **{**base, name: 1}) for name in base}
    assert len(seeds) == 8
    many = {
        request_seed(1, step=s, group_id=g, index_in_group=i)
        for s in range(10)
        for g in range(50)
        for i in range(16)
    }
    assert len(many) == 8000
    assert all(0 < seed < 2**63 for seed in many)
    assert len({seed & 0xFFFFFFFF for seed in many}) > 7990, "torch on a CPU uses the low 32 bits"


def test_a_seed_never_changes_between_versions() -> None:
    assert request_seed(1, step=2, group_id=3, index_in_group=4, attempt=5) == 1453004443496478425

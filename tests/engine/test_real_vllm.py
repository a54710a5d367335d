"""Promises of the engine, kept by a real vLLM on the CPU in float32 (bounds are of every token, not of a mean)."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file

from vime_hpc.engine.client import EngineAnswer, EngineControl, EngineHTTPClient
from vime_hpc.engine.expected import EngineShape, expected_layout
from vime_hpc.engine.process_guard import session_pids, shared_memory_of
from vime_hpc.engine.tokens import generate_token
from vime_hpc.engine.update import EngineWeightReceiver
from vime_hpc.errors import EngineError, WeightsMismatchError
from vime_hpc.roles.readback import compare_engines
from vime_hpc.testing.transport_suite import FaultyFiles
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.engine_layout import EngineLayout, RankLayout, Slice
from vime_hpc.weights.version import WeightState
from vime_hpc.weights.version_directory import read_manifest
from vime_hpc.weights.version_tools import export

from real_engine import LosingControl, RealEngine, Tensors, hf_logprobs, plan_of  # isort: skip

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
PROMPT = [1, 2, 3, 4, 5] * 20  # three whole blocks of 32: a stale prefix cache would show
BOUND = 1e-4


def sample(
    engine: RealEngine,
    *,
    seed: int = 11,
    prompt: list[int] | None = None,
    max_tokens: int = 40,
    **more: Any,
) -> EngineAnswer:
    async def main() -> EngineAnswer:
        async with EngineHTTPClient([engine.url], engine.token) as client:
            return await client.sample(
                prompt_tokens=PROMPT if prompt is None else prompt,
                seed=seed,
                max_tokens=max_tokens,
                **more,
            )

    return asyncio.run(main())


def worst(engine: RealEngine, model: int, answer: EngineAnswer, temperature: float = 1.0) -> float:
    expected = hf_logprobs(engine.models[model], PROMPT, answer.tokens, temperature)
    assert len(answer.logprobs) == len(expected) > 0
    return max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True))


def weights(engine: RealEngine, model: int) -> Tensors:
    return load_file(engine.models[model] / "model.safetensors")


def update(
    engine: RealEngine, tensors: Tensors, version: int, mode: str = "wait"
) -> dict[str, float]:
    receiver, thread, errors = engine.publishing(tensors, version)

    async def main() -> dict[str, float]:
        await receiver.join()
        found, metrics = await receiver.receive_newest(version, mode)
        assert found == receiver.version == version
        return metrics

    metrics = asyncio.run(main())
    thread.join(30)
    assert errors == []
    return metrics


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_temperature_scaled_distribution(
    dense_engine: RealEngine, temperature: float
) -> None:
    answer = sample(dense_engine, temperature=temperature)
    assert worst(dense_engine, 0, answer, temperature) < BOUND


def test_the_same_seed_gives_the_same_tokens_alone_or_in_a_batch(dense_engine: RealEngine) -> None:
    alone = sample(dense_engine, seed=5)

    async def main() -> list[EngineAnswer]:
        async with EngineHTTPClient([dense_engine.url], dense_engine.token) as client:
            asks = (client.sample(prompt_tokens=PROMPT, seed=s, max_tokens=40) for s in range(12))
            return await asyncio.gather(*asks)

    batch = asyncio.run(main())
    assert batch[5].tokens == alone.tokens
    assert batch[5].logprobs == alone.logprobs
    assert len({tuple(a.tokens) for a in batch}) == 12


def test_requests_that_cannot_be_answered_fail_once_with_vllms_reason(
    dense_engine: RealEngine,
) -> None:
    too_long = sample(dense_engine, prompt=[1] * 600)
    assert (too_long.finish_reason, too_long.num_tries) == ("failed", 1)
    assert "maximum context length is 512" in too_long.cause
    assert "out of vocabulary" in sample(dense_engine, prompt=[1, 700]).cause


def test_every_route_of_the_server_demands_the_token(dense_engine: RealEngine) -> None:
    url = urlsplit(dense_engine.url)

    def ask(method: str, path: str, bearer: str | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=30)
        headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    status, text = ask("GET", "/openapi.json", dense_engine.token)
    assert status == 200
    paths: dict[str, dict[str, Any]] = json.loads(text)["paths"]
    routes = [(m.upper(), p) for p, methods in paths.items() for m in methods]
    assert {("POST", "/pause"), ("POST", "/collective_rpc"), ("POST", "/v1/completions")} <= set(
        routes
    )
    routes += [("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/metrics"), ("GET", "/health")]
    assert {ask(m, p, None)[0] for m, p in routes} == {401}
    assert {ask(m, p, "0" * 64)[0] for m, p in routes} == {401}
    capability = generate_token(dense_engine.token)
    control = [
        r
        for r in routes
        if r[1] in ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/metrics")
    ]
    assert len(control) >= 5
    assert {ask(m, p, capability)[0] for m, p in control} == {401}


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_new_weights_are_served_bit_for_bit_and_no_old_prefix_is_used(
    dense_engine: RealEngine, mode: str
) -> None:
    model = {"wait": 1, "abort": 0, "keep": 1}[mode]
    sample(dense_engine)  # leaves the prompt's blocks of the old weights in the prefix cache
    metrics = update(dense_engine, weights(dense_engine, model), version=1, mode=mode)
    assert metrics["weights/rank_nbytes"] == plan_of(weights(dense_engine, model)).nbytes
    assert worst(dense_engine, model, sample(dense_engine)) < BOUND


def test_a_request_frozen_by_keep_goes_on_with_the_new_weights(dense_engine: RealEngine) -> None:
    receiver, thread, errors = dense_engine.publishing(weights(dense_engine, 0), 2)

    async def main() -> EngineAnswer:
        await receiver.join()
        async with EngineHTTPClient([dense_engine.url], dense_engine.token) as client:
            flight = asyncio.create_task(
                client.sample(prompt_tokens=PROMPT, seed=3, max_tokens=350, ignore_eos=True)
            )
            await asyncio.sleep(0.5)
            await receiver.receive_newest(2, "keep")
            return await flight

    answer = asyncio.run(main())
    thread.join(30)
    assert errors == []
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 350)
    old = hf_logprobs(dense_engine.models[1], PROMPT, answer.tokens)
    new = hf_logprobs(dense_engine.models[0], PROMPT, answer.tokens)
    is_old = [abs(a - b) < BOUND for a, b in zip(answer.logprobs, old, strict=True)]
    is_new = [abs(a - b) < BOUND for a, b in zip(answer.logprobs, new, strict=True)]
    switch = is_old.index(False)
    assert 0 < switch < 350
    assert all(
        is_new[switch:]
    )  # one change of weights, and every later token is the new ones' alone


def test_a_withheld_tensor_is_named_before_anything_is_paused(dense_engine: RealEngine) -> None:
    tensors = weights(dense_engine, 1)
    del tensors["lm_head.weight"]
    receiver, thread, errors = dense_engine.publishing(tensors, 3)
    with pytest.raises(EngineError, match=r"1 missing: lm_head\.weight"):
        asyncio.run(receiver.join())
    thread.join(30)
    assert "lm_head.weight" in str(errors[0])
    assert (
        worst(dense_engine, 0, sample(dense_engine)) < BOUND
    )  # still in service, with the weights it had


def refused_and_healed(engine: RealEngine, name: str, *, part: str = "", at: Any = ...) -> str:
    """An update in which a place of a tensor is altered, but the digest told is the honest one's; and an honest one after it.

    Returns the error that stopped the first.
    """
    honest = weights(engine, 1)

    def train(channel: Any, make_sender: Any) -> None:
        altered = {**honest, name: honest[name].clone()}
        altered[name][at] += 0.5
        end = make_sender(plan_of(honest))
        channel.announce(3)
        channel.wait_wanted(3)
        digests, _ = end.send(iter(altered.items()), 3)
        piece = honest[name][at].contiguous()
        told = tensor_digest(piece.numpy(), "float32", tuple(piece.shape))
        channel.put_sent(3, {**digests, part + name: told})
        channel.wait_confirmed(3, "never")

    receiver, thread, errors = engine.bridge(train)

    async def main() -> str:
        await receiver.join()
        with pytest.raises(WeightsMismatchError) as found:
            await receiver.receive_newest(3)
        assert receiver.states == [WeightState.UPDATING]
        assert await engine.control().is_paused()
        return str(found.value)

    text = asyncio.run(main())
    thread.join(30)
    assert name in str(errors[0])
    update(engine, honest, version=3)
    assert not asyncio.run(engine.control().is_paused())
    assert worst(engine, 1, sample(engine)) < BOUND
    return text


def test_an_altered_tensor_is_named_the_engine_stays_paused_and_a_full_version_heals_it(
    dense_engine: RealEngine,
) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    assert f"1 of 47 tensors differ: {name}" in refused_and_healed(dense_engine, name)


def test_a_full_version_and_a_delta_over_it_are_served_from_disk_bit_for_bit(
    dense_engine: RealEngine, tmp_path: Path
) -> None:
    first = weights(dense_engine, 0)
    second = {n: t.clone() for n, t in first.items()}
    second["model.layers.1.mlp.up_proj.weight"][::9, ::11] += 0.5
    root = tmp_path / "weights"
    receiver, thread, errors = dense_engine.publishing_versions(root, [first, second])

    async def main() -> list[dict[str, float]]:
        await receiver.join()
        return [(await receiver.receive_newest(v))[1] for v in (1, 2)]

    metrics = asyncio.run(main())
    thread.join(30)
    assert errors == []
    assert [read_manifest(root / f"v00000{v}").kind for v in (1, 2)] == ["full", "delta"]
    assert metrics[1]["weights/rank_nbytes"] < metrics[0]["weights/rank_nbytes"] / 1000
    export(root / "v000002", tmp_path / "second", dense_engine.models[0])
    answer = sample(dense_engine)
    expected = hf_logprobs(tmp_path / "second", PROMPT, answer.tokens)
    assert max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)) < BOUND
    assert worst(dense_engine, 0, answer) > 100 * BOUND  # the change shows


def test_a_damaged_version_on_disk_never_touches_the_engine_which_serves_on(
    dense_engine: RealEngine, tmp_path: Path
) -> None:
    before = sample(dense_engine)
    name, honest = "model.layers.2.mlp.down_proj.weight", weights(dense_engine, 1)
    files = FaultyFiles(None, honest[name].numpy().tobytes())
    receiver, thread, errors = dense_engine.publishing_versions(tmp_path, [honest], files)

    async def main() -> None:
        await receiver.join()
        with pytest.raises(
            EngineError, match=rf"v000001.*tensor {name}: found digest \w+, expected"
        ):
            await receiver.receive_newest(1)
        assert receiver.states == [WeightState.CLEAN]
        assert not await dense_engine.control().is_paused()

    asyncio.run(main())
    thread.join(30)
    assert name in str(errors[0])
    assert sample(dense_engine) == before


PHASES = ["/pause", "vime_receive", "/reset_prefix_cache", "/resume"]
FAULTS = [("bridge", call, "after") for call in PHASES]
FAULTS += [("bridge", call, "before") for call in PHASES if call != "vime_receive"]
FAULTS += [("disk", call, "before") for call in ["vime_prepare", *PHASES]]


def test_whatever_call_of_a_publish_is_lost_no_mixed_engine_serves_and_the_next_bridge_heals_it(
    dense_engine: RealEngine, tmp_path: Path
) -> None:
    def publishing(transport: str, model: int, control: EngineControl | None) -> Any:
        tensors, root = weights(dense_engine, model), tmp_path / str(dense_engine.epoch)
        if transport == "disk":
            return dense_engine.publishing_versions(root, [tensors], control=control)
        return dense_engine.publishing(tensors, 1, control)

    async def fails(receiver: EngineWeightReceiver, words: str) -> None:
        await receiver.join()
        with pytest.raises(EngineError, match=words):
            await receiver.receive_newest(1)
        assert 0 in receiver.unreachable
        if receiver.states == [WeightState.UPDATING]:
            assert await dense_engine.control().is_paused()

    async def heals(receiver: EngineWeightReceiver) -> None:
        await receiver.join()
        await receiver.receive_newest(1)
        assert receiver.states == [WeightState.CLEAN]
        assert not await dense_engine.control().is_paused()

    for number, (transport, call, moment) in enumerate(FAULTS):
        model, control = number % 2, LosingControl(dense_engine, call, moment)
        receiver, thread, errors = publishing(transport, model, control)
        asyncio.run(fails(receiver, f"lost {moment} {call}"))
        thread.join(30)
        assert control.lost
        if call == "/resume":  # every engine had confirmed by then
            assert errors == []
        else:
            assert f"lost {moment} {call}" in str(errors[0])
        receiver, thread, errors = publishing(transport, model, None)
        asyncio.run(heals(receiver))
        thread.join(30)
        assert errors == []
        assert worst(dense_engine, model, sample(dense_engine)) < BOUND


def test_readback_on_the_cpu_says_that_it_cannot_and_why(dense_engine: RealEngine) -> None:
    with pytest.raises(EngineError, match="vLLM repacks weights"):
        asyncio.run(dense_engine.control().collective_rpc("vime_readback"))
    (found,) = asyncio.run(compare_engines([dense_engine.control()]))
    assert "repacks weights" in found["cannot"]


def killed_without_leftovers(engine: RealEngine) -> None:
    shared = shared_memory_of(session_pids(engine.session))
    os.kill(engine.owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while session_pids(engine.session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert session_pids(engine.session) == []
    assert [p for p in shared if p.exists()] == []
    assert not engine.private.exists()
    with socket.socket() as s:
        s.bind(("127.0.0.1", urlsplit(engine.url).port or 0))


def test_sigkill_of_the_owner_leaves_no_process_port_or_shared_memory(
    dense_engine: RealEngine,
) -> None:
    assert len(session_pids(dense_engine.session)) >= 2
    killed_without_leftovers(dense_engine)


def test_one_recorded_load_tells_the_slices_of_a_rank_which_are_all_its_bytes_and_it_serves_on(
    moe_tp2_engine: RealEngine,
) -> None:
    engine, whole = moe_tp2_engine, weights(moe_tp2_engine, 0)
    replies = asyncio.run(engine.control().collective_rpc("vime_layout"))
    layouts = [RankLayout.from_json(reply["layout"]) for reply in replies]
    shapes = {name: tuple(t.shape) for name, t in whole.items()}
    config = json.loads((engine.models[0] / "config.json").read_text())
    expected = expected_layout(shapes, config, EngineShape(1, 2), "float32")
    assert EngineLayout.of_ranks(layouts) == expected, "`vime-hpc plan` shows another layout"
    for rank, layout in enumerate(layouts):
        expert = "model.layers.3.mlp.experts.7."
        assert layout.slices[f"{expert}gate_proj.weight"] == Slice((32 * rank, 0), (32, 64))
        assert layout.slices[f"{expert}down_proj.weight"] == Slice((0, 32 * rank), (64, 32))
        assert "model.norm.weight" not in layout.slices  # whole
        parts = (layout.slices.get(n, Slice((), tuple(t.shape))).numel for n, t in whole.items())
        assert 4 * sum(parts) == layout.held
    assert worst(engine, 0, sample(engine)) < BOUND


def test_a_slice_that_arrived_altered_is_named_with_its_rank(moe_tp2_engine: RealEngine) -> None:
    name, columns = "model.layers.2.mlp.experts.5.down_proj.weight", (slice(None), slice(32, 64))
    text = refused_and_healed(moe_tp2_engine, name, part="1/", at=columns)
    assert "engine 0, rank 1: weights of version 3" in text
    assert f"tensors differ: {name}" in text


def test_moe_on_two_tensor_parallel_ranks_updates_exactly_and_records_its_routing(
    moe_tp2_engine: RealEngine,
) -> None:
    engine = moe_tp2_engine
    whole = weights(engine, 0)
    update(engine, whole, version=1)
    assert worst(engine, 0, sample(engine)) < BOUND
    whole = weights(engine, 1)
    metrics = update(engine, whole, version=2)
    assert metrics["weights/engine_stall_s"] < 60
    assert metrics["weights/received_over_held"] == 1.0
    assert metrics["weights/rank_nbytes"] < 0.51 * sum(t.nbytes for t in whole.values())
    answer = sample(engine)
    assert worst(engine, 1, answer) < BOUND
    assert answer.routed_experts is not None
    assert torch.equal(
        torch.from_numpy(answer.routed_experts).long(),
        _routing(engine.models[1], PROMPT + answer.tokens),
    )
    killed_without_leftovers(engine)


def _routing(path: Path, tokens: list[int]) -> torch.Tensor:
    """[tokens - 1, layers * top_k] by transformers, sorted as the router's own top-k."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: found.append(out[2]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.stack(found, dim=1)[:-1].reshape(len(tokens) - 1, -1)

"""Every CPU twin of a torch.cuda attribute does what megatron-core needs of it, and leaves no trace
when not wanted.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from vime_hpc.trainer import cuda_on_cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the twins are for machines without CUDA"
)


@pytest.fixture
def twins() -> Iterator[None]:
    with cuda_on_cpu.temporarily():
        yield


def test_outside_the_block_torch_is_untouched() -> None:
    before = {name: getattr(torch.cuda, name) for name in cuda_on_cpu.TWINS}
    with cuda_on_cpu.temporarily():
        assert cuda_on_cpu.installed()
    assert {name: getattr(torch.cuda, name) for name in cuda_on_cpu.TWINS} == before
    assert not cuda_on_cpu.installed()


def test_every_twin_is_an_object_of_its_own() -> None:
    assert len({id(twin) for twin in cuda_on_cpu.TWINS.values()}) == len(cuda_on_cpu.TWINS)


@pytest.mark.usefixtures("twins")
def test_current_device_and_set_device_mean_the_cpu() -> None:
    torch.cuda.set_device(3)
    assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"


@pytest.mark.usefixtures("twins")
def test_streams_and_events_are_always_done() -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record(stream)
    event.wait()
    event.synchronize()
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(stream.record_event())
    torch.cuda.default_stream().synchronize()
    torch.cuda.synchronize()
    assert event.query()
    assert stream.query()
    with torch.cuda.stream(stream):
        pass


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("module", [torch.cuda, torch.cuda.random])
def test_random_state_of_cuda_is_that_of_the_cpu(module: object) -> None:
    module.manual_seed(7)  # type: ignore[attr-defined]
    state = module.get_rng_state()  # type: ignore[attr-defined]
    first = torch.rand(3)
    module.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(3), first)


@pytest.mark.usefixtures("twins")
def test_default_generators_and_lazy_call_act_at_once() -> None:
    assert torch.cuda.default_generators[0] is torch.default_generator
    assert len(torch.cuda.default_generators) == 1
    called = []
    torch.cuda._lazy_call(lambda: called.append(1))
    assert called == [1]


@pytest.mark.usefixtures("twins")
def test_literal_cuda_devices_become_the_cpu() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device="cuda:1").device.type == "cpu"
    assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.zeros(2, device=0).device.type == "cpu"
    assert torch.zeros(2).to("cuda").device.type == "cpu"
    assert torch.zeros(2).to(device="cuda").device.type == "cpu"


@pytest.mark.usefixtures("twins")
def test_cuda_and_pin_memory_do_nothing() -> None:
    tensor = torch.zeros(2)
    assert tensor.cuda() is tensor
    assert tensor.pin_memory() is tensor
    assert torch.zeros(2, pin_memory=True).shape == (2,)


@pytest.mark.usefixtures("twins")
def test_type_says_cuda_so_that_megatrons_optimizers_accept_the_parameter() -> None:
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(2).type(torch.float64).dtype is torch.float64


def test_installing_after_megatron_is_refused_because_random_states_would_be_lost() -> None:
    code = (
        "import sys, types\n"
        "module = types.ModuleType('megatron.core.tensor_parallel.random'); module._lazy_call = object()\n"
        "sys.modules[module.__name__] = module\n"
        "from vime_hpc.trainer import cuda_on_cpu\n"
        "try: cuda_on_cpu.install()\n"
        "except RuntimeError as error: assert 'imported before' in str(error); sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 7


def test_where_cuda_is_available_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda_on_cpu.install()
    with cuda_on_cpu.temporarily():
        assert not cuda_on_cpu.installed()

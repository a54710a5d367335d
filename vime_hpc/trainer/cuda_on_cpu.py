"""Let megatron-core run on a machine without CUDA: the only patch of this package, and nothing of
megatron's is touched.

megatron-core asks `torch.cuda` for devices, streams, events and random states on its ordinary
training path (DDP, optimizers, schedules, pipeline p2p, recompute), with no switch to say
otherwise. `install()` answers about fifteen attributes of `torch.cuda` with CPU twins, and a
`TorchFunctionMode` (torch's public override API) handles literal `device="cuda"`, `.cuda()`,
`pin_memory` and the optimizers' comparison of `tensor.type()` with 'torch.cuda.FloatTensor'. The
mode costs 3.4 microseconds per small operation (measured: 7.1 -> 10.5).

Call it BEFORE the first import of megatron: `megatron.core.tensor_parallel.random` binds
    `torch.cuda._lazy_call` by
name, and installed later the random state would be queued for ever and silently lost. Where CUDA is
available it does nothing. The mode is per thread; on a CPU the backward pass runs in the calling
thread, so it is seen there too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class CudaLiteralsOnCpu(TorchFunctionMode):
    """Turns every mention of a CUDA device in a torch call into the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                kwargs = {**kwargs, "device": "cpu"}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if (
            func is torch.Tensor.to
            and len(args) > 1
            and isinstance(args[1], str | torch.device)
            and _is_cuda(args[1])
        ):
            args = (args[0], "cpu", *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # optimizer.py, distrib_optimizer.py and clip_grads.py compare with
            # 'torch.cuda.FloatTensor'
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class CpuEvent:
    """torch.cuda.Event where everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class CpuStream(CpuEvent):
    """torch.cuda.Stream: the CPU has one, and it is always in order."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or CpuEvent()


class _CpuGenerators:
    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


# One function object per replaced name: torch._dynamo's rule map refuses one object standing under
# two names.
def _current_device() -> str:
    return "cpu"


def _set_device(device: Any) -> None:
    pass


def _synchronize(device: Any = None) -> None:
    pass


_STREAM = CpuStream()


def _current_stream(device: Any = None) -> CpuStream:
    return _STREAM


def _default_stream(device: Any = None) -> CpuStream:
    return _STREAM


def _stream(stream: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _lazy_call(function: Callable[[], Any], **kwargs: Any) -> None:
    function()


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


TWINS: dict[str, Any] = {
    "current_device": _current_device,
    "set_device": _set_device,
    "synchronize": _synchronize,
    "Stream": CpuStream,
    "Event": CpuEvent,
    "current_stream": _current_stream,
    "default_stream": _default_stream,
    "stream": _stream,
    "default_generators": _CpuGenerators(),
    "_lazy_call": _lazy_call,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
}
"""What stands in for which attribute of torch.cuda; each has a test in
tests/unit/trainer/test_cuda_on_cpu.py.
"""

_IN_RANDOM_TOO = (
    "get_rng_state",
    "set_rng_state",
    "manual_seed",
)  # torch.cuda.random holds its own names


def installed() -> bool:
    """Whether the twins are in place in this process."""
    present: object = torch.cuda.current_device
    return present is _current_device


def install() -> None:
    """Put the twins in place for the rest of the process; nothing where CUDA is available or it was
    done before.

    Raises:
        RuntimeError: megatron was imported before, so its own references to torch.cuda are already
            bound.
    """
    if torch.cuda.is_available() or installed():
        return
    megatron_random = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron_random is not None and megatron_random._lazy_call is not _lazy_call:
        raise RuntimeError(
            "megatron.core was imported before vime_hpc.trainer.cuda_on_cpu.install(); on a machine without CUDA its "
            "random states would be lost silently. Call install() before anything imports megatron"
        )
    _put_in_place()
    CudaLiteralsOnCpu().__enter__()  # type: ignore[no-untyped-call]  # for the rest of the process


def _put_in_place() -> None:
    for name, twin in TWINS.items():
        setattr(torch.cuda, name, twin)
    for name in _IN_RANDOM_TOO:
        setattr(torch.cuda.random, name, TWINS[name])


@contextlib.contextmanager
def temporarily() -> Iterator[None]:
    """The twins in place inside the block only; megatron may be imported inside, and used again
    after install().
    """
    if torch.cuda.is_available():
        yield
        return
    kept = {name: getattr(torch.cuda, name) for name in TWINS}
    kept_random = {name: getattr(torch.cuda.random, name) for name in _IN_RANDOM_TOO}
    _put_in_place()
    try:
        with CudaLiteralsOnCpu():
            yield
    finally:
        for name, value in kept.items():
            setattr(torch.cuda, name, value)
        for name, value in kept_random.items():
            setattr(torch.cuda.random, name, value)

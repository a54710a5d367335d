"""Run a function in several ranks on this machine: import once, fork, real gloo.

Starting each rank as a new interpreter costs 10-25 s of imports per rank (torch, megatron-core); a
forked pair of ranks runs a whole parity test in 1-4 s. The store is a file: TCP ports of parallel
test runs clash now and then.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vime_hpc.errors import DeadlineError, VimeError

MEGATRON_MODULES = (
    "vime_hpc.trainer.step",
    "vime_hpc.trainer.export",
    "vime_hpc.trainer.checkpoint",
)


class RankFailed(VimeError):
    """A rank of run_ranks raised; the message holds its traceback."""


def preload(modules: tuple[str, ...] = MEGATRON_MODULES) -> None:
    """Import modules that use megatron in this process without leaving the CUDA twins in its torch."""
    from vime_hpc.trainer import cuda_on_cpu

    with warnings.catch_warnings(), cuda_on_cpu.temporarily():
        warnings.simplefilter("ignore")
        for module in modules:
            importlib.import_module(module)


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    /,
    *args: Any,
    timeout_s: float = 120.0,
    megatron: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(rank, *args, **kwargs)` in num_ranks forked processes with a gloo default
    group.

    Args:
        function: any callable (forked, so closures work); its result must be picklable.
        timeout_s: for everything together, and for each collective.
        megatron: import the trainer before forking and install the CUDA twins in each rank.
    Returns:
        The results in rank order.
    Raises:
        RankFailed: a rank raised or died; the others are killed.
        DeadlineError: names the ranks that had not returned in time.
    """
    if megatron and torch.cuda.is_available():
        raise RuntimeError(
            "run_ranks(megatron=True) compares layouts on the CPU with gloo, and Megatron-Core takes the GPU "
            "wherever it sees one: start the tests with CUDA_VISIBLE_DEVICES= (empty)"
        )
    if megatron:
        preload()
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = Path(folder) / "store"
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            context.Process(
                target=_rank,
                daemon=True,
                args=(
                    function,
                    rank,
                    num_ranks,
                    store,
                    pipes[rank][1],
                    timeout_s,
                    megatron,
                    args,
                    kwargs,
                ),
            )
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], timeout_s)
        finally:
            for rank in ranks:
                rank.join(0.5)
                if rank.is_alive():
                    rank.kill()
                    rank.join()


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(receivers):
        waiting = [r for i, r in enumerate(receivers) if i not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [i for i in range(len(receivers)) if i not in results]
            raise DeadlineError(
                f"ranks {missing} of {len(receivers)} had not returned after {timeout_s:g} s"
            )
        for rank in [i for i, receiver in enumerate(receivers) if receiver in ready]:
            try:
                value, error = receivers[rank].recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word (killed, or os._exit)") from None
            if error is not None:
                raise RankFailed(f"rank {rank}:\n{error}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    store: Path,
    sender: Connection,
    timeout_s: float,
    megatron: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    try:
        torch.set_num_threads(1)  # a forked child must not wait for its parent's OpenMP threads
        warnings.simplefilter("ignore")
        if megatron:
            from vime_hpc.trainer import cuda_on_cpu

            cuda_on_cpu.install()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        sender.send((function(rank, *args, **kwargs), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it was, the parent has to hear of it
        with contextlib.suppress(BrokenPipeError):
            sender.send((None, traceback.format_exc()))
        os._exit(1)
    os._exit(0)  # no atexit handlers of the parent's pytest in the child

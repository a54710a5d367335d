"""The trainer's side of one publish, whatever the transport: the same call on every sender."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

import torch

from vime_hpc.weights.bridge import Timings
from vime_hpc.weights.bucket_digests import Digests
from vime_hpc.weights.channel import PublishChannel

Metrics = dict[str, float]


class Sender(Protocol):
    """One trainer sender's end of a transport: bridge, shared memory, or version directories."""

    source: int
    early: bool
    """Whether it may send before the engines stand still."""

    def send(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int = 0
    ) -> tuple[Digests, Timings]: ...

    def confirm(self, version: int) -> None:
        """Called once every engine confirmed: what the next version builds on may advance."""


def publish(
    channel: PublishChannel,
    sender: Sender,
    version: int,
    tensors: Iterator[tuple[str, torch.Tensor]],
    *,
    num_sources: int = 1,
    engines_timeout_s: float | None = None,
) -> Metrics:
    """Send `tensors` as `version`; returns once every engine confirmed the root digest of what arrived.

    Args:
        sender: this sender's end; `sender.source` 0 speaks for all in the channel.
        tensors: this sender's tensors in the plan's order (a generator may gather them one by one).
        num_sources: senders in all.
        engines_timeout_s: how long the engines may take to be ready (they finish requests first); none = channel's.
    Returns:
        seconds by phase and bytes sent, under weights/….
    Raises:
        DeadlineError, WeightsMismatchError: not published; the other side is told to stop waiting.
    """
    start = time.perf_counter()
    try:
        if sender.source == 0:
            channel.announce(version)
        # Shared memory and files are filled while the engines still finish what they do.
        early = sender.early
        if not early:
            channel.wait_wanted(version, engines_timeout_s)
        wanted = time.perf_counter()
        digests, timings = sender.send(tensors, version)
        sent = time.perf_counter()
        if sender.source == 0:
            for source in range(1, num_sources):
                digests.update(channel.get_part(version, source))
            root = channel.put_sent(version, digests)
        else:
            channel.put_part(version, sender.source, digests)
            root = channel.wait_sent_root(version)
        if early:
            channel.wait_wanted(version, engines_timeout_s)
        channel.wait_confirmed(version, root)
        sender.confirm(version)
    except BaseException as error:
        channel.fail(
            f"trainer sender {sender.source}, publishing version {version}: {type(error).__name__}: {error}"
        )
        raise
    done = time.perf_counter()
    return {
        "weights/wait_engines_s": wanted - start, "weights/send_s": sent - wanted, "weights/confirm_s": done - sent,
        "weights/produce_s": timings.produce_s, "weights/transfer_s": timings.transfer_s,
        "weights/digest_wait_s": timings.digest_s, "weights/nbytes": float(timings.nbytes),
    }  # fmt: skip

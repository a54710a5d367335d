"""What both ends of the bridge must agree on before they meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vime_hpc.errors import ConfigError
from vime_hpc.weights.disk import DIRECTORIES
from vime_hpc.weights.ipc import IPC

FIRST_EPOCH = 1
"""Number of the first building of the bridge in an attempt; each further one takes the next."""
CALL = "bridge/{epoch}/call"
"""Rendezvous key: all engines are up again; trainer senders, come to this epoch. Not needed for the first."""
WANTED = "bridge/{epoch}/wanted"
"""Rendezvous key: the trainer is there, too; build the bridge with this backend."""
DEVICE = "bridge_device/{source}"
"""Rendezvous key: the device (groups.device_identity) sender `source` computes on."""


def bridge_backend(
    transport: str,
    senders: Sequence[str],
    receivers: Sequence[str],
    reach: Sequence[Sequence[str]],
) -> Literal["gloo", "nccl", "ipc", "disk"]:
    """The backend for members on these devices (groups.device_identity of each).

    disk where weights go through files, ipc where weights.transport asks for it; else nccl where every member has a GPU of
    its own; gloo, through the host's memory, where a member computes on a CPU or two share a GPU: NCCL refuses two ranks
    on one device.

    Args:
        reach: of every engine rank, the GPUs whose memory it can open (ipc.devices_in_reach).
    Raises:
        ConfigError: ipc, but an engine rank cannot open a sender's memory.
    """
    if transport in DIRECTORIES:
        return "disk"
    devices = [*senders, *receivers]
    if transport == IPC:
        far = [
            f"sender {s} on {device} and engine rank {r} on {receivers[r]}"
            for s, device in enumerate(senders)
            for r, near in enumerate(reach)
            if device not in near
        ]
        if far:
            raise ConfigError(
                f'weights.transport = "ipc" needs trainer and engines on the GPUs of one node that reach each other\'s '
                f'memory; these do not: {"; ".join(far)}. Use "bridge"'
            )
        return "ipc"
    apart = len(set(devices)) == len(devices)
    return "nccl" if apart and "cpu" not in devices else "gloo"

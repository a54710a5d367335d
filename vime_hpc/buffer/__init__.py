"""The rollout buffer: committed rollouts as ordinary HDF5 files. Needs numpy, h5py and xxhash; no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime_hpc.buffer.store import RolloutBuffer

__all__ = ["RolloutBuffer"]


def __getattr__(name: str) -> Any:
    """`from vime_hpc.buffer import RolloutBuffer`, imported at first use: the schema alone needs no HDF5."""
    if name != "RolloutBuffer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vime_hpc.buffer.store import RolloutBuffer

    return RolloutBuffer

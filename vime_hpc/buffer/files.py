"""Durable file operations of the buffer, and the numbered points between them at which a crash test may stop.

What makes a write durable (POSIX): fsync of the file, rename to its final name, fsync of the directory. H5Fflush does
none of it (measured with strace, HDF5 2.0).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import xxhash

_READ_BYTES = 1 << 20  # stays in the cache between reading and hashing


class Disk:
    """The file system as the buffer uses it. Tests pass a subclass that stops, fails or records at `at`."""

    def __init__(self, *, durable: bool = True) -> None:
        self.durable = durable
        """False skips every fsync: for tests and throw-away runs only."""

    def at(self, point: str) -> None:
        """Called between the operations of the write protocol, with the name of the point just passed."""

    def sync_file(self, path: Path) -> None:
        """Force a file's data and metadata to the device, whoever wrote it."""
        if self.durable:
            with _descriptor(path, os.O_RDONLY) as descriptor:
                os.fsync(descriptor)

    def sync_descriptor(self, descriptor: int) -> None:
        """Force the data of an open file, and what is needed to find it, to the device."""
        os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Force the names in a directory to the device: a rename is not durable before."""
        if self.durable:
            with _descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                os.fsync(descriptor)

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents, each name durable in its parent."""
        if path.is_dir():
            return
        self.make_directory(path.parent)
        path.mkdir(exist_ok=True)
        self.sync_directory(path.parent)

    def write_aside(self, path: Path, data: bytes) -> None:
        """Write a small file whose name is not yet the final one, durably."""
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            if self.durable:
                os.fsync(file.fileno())

    def publish(self, aside: Path, path: Path) -> None:
        """Give a complete file its final name, atomically and durably."""
        os.rename(aside, path)
        self.sync_directory(path.parent)


class BackgroundSync:
    """Forces a file to the device in a thread while it is still being written, and once more when it is complete.

    The device then works all the time, and the last sync has little left to do.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._path = disk, path
        self._thread = ThreadPoolExecutor(1)
        self._syncs: list[Future[None]] = []

    def start(self) -> None:
        """Sync what is written by now; returns at once."""
        self._syncs.append(self._thread.submit(self._disk.sync_file, self._path))

    def finish(self) -> None:
        """Wait for every sync that was started. Raises the first error of any."""
        for sync in self._syncs:
            sync.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


def file_digest(path: Path) -> tuple[int, str]:
    """Size in bytes and XXH3-128 (32 hex digits) of a file."""
    # Mapping the file would save the copy (8 ms in place of 17 for 126 MB), but a device's error would then be a SIGBUS.
    state, size, buffer = xxhash.xxh3_128(), 0, bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(view[:count])
            size += count
    return size, state.hexdigest()


@contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

"""What a file system may look like after power loss: replay a recorded syscall trace and drop what was never synced.

The model is the weakest POSIX allows: a name is durable after fsync of its directory, data after fsync or fdatasync of the
file; before that every 512-byte sector and every change of a name may or may not have reached the device, in any order.
The one thing granted is that a directory has one name: its rename happened or did not.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 512
_CALLS = "openat,write,pwrite64,rename,renameat,renameat2,fsync,fdatasync,ftruncate,mkdir,mkdirat,link,linkat,unlink,unlinkat,rmdir"
_LINE = re.compile(r"^(?:\d+\s+)?(\w+)\((.*)\)\s+= (-?\d+)")
_RESUMED = re.compile(r"^\d+\s+<\.\.\. \w+ resumed>(.*)$")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FD = re.compile(r"^\d+<([^>]*)>")


@dataclass(slots=True)
class Event:
    """One system call below the watched directory."""

    call: str
    path: str
    data: bytes = b""
    offset: int | None = None
    target: str = ""


@dataclass(slots=True)
class Inode:
    """A file's bytes as the process sees them, and as they surely are on the device."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    dirty: set[int] = field(default_factory=set)


def record(command: Sequence[str], root: Path, trace: Path) -> list[Event]:
    """Run a command under strace and return its file system calls below `root`, in order."""
    subprocess.run(
        [
            "strace",
            "-f",
            "-y",
            "-xx",
            "-s",
            "67108864",
            "-e",
            f"trace={_CALLS}",
            "-o",
            str(trace),
            *command,
        ],
        check=True,
    )
    events, begun = [], dict[str, str]()
    for line in trace.read_text().splitlines():
        # Calls of two threads at once are split in two lines; they count from their end on.
        thread = line.split(" ", 1)[0]
        if line.endswith(" <unfinished ...>"):
            begun[thread] = line.removesuffix(" <unfinished ...>")
            continue
        if resumed := _RESUMED.match(line):
            line = begun.pop(thread) + resumed[1]
        match = _LINE.match(line)
        if match and int(match[3]) >= 0:
            event = _parse(match[1], match[2])
            if event is not None and event.path.startswith(str(root)):
                events.append(event)
    return events


class Replay:
    """The file system after some prefix of the events."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._names: dict[str, Inode | None] = {self._root: None}
        self._durable: dict[str, Inode | None] = dict(self._names)
        self._moved: list[tuple[str, str]] = []
        """Renames of directories whose parent was not synced since."""

    def create_durable(self, name: str, data: bytes | None) -> None:
        """Something that was there, safely, before the trace began; None = a directory."""
        inode = None if data is None else Inode(bytearray(data), data)
        self._names[name] = self._durable[name] = inode

    def apply(self, event: Event) -> None:
        """One more call of the trace."""
        name, names = event.path, self._names
        if event.call == "open":
            names.setdefault(name, Inode())
            inode = names[name]
            if event.offset == 0 and inode is not None:  # O_TRUNC
                self._resize(inode, 0)
        elif event.call == "write":
            inode = names[name]
            assert inode is not None
            self._write(inode, len(inode.now) if event.offset is None else event.offset, event.data)
        elif event.call == "truncate":
            inode = names[name]
            assert inode is not None
            assert event.offset is not None
            self._resize(inode, event.offset)
        elif event.call == "sync":
            self._sync(name)
        elif event.call == "mkdir":
            names[name] = None
        elif event.call == "link":
            names[event.target] = names[name]
        elif event.call == "remove":
            del names[name]
        else:
            self._rename(name, event.target)

    def crash(self, target: Path, rng: random.Random) -> None:
        """Write one possible state of the device to `target`."""
        changed = [
            name
            for name in {*self._names, *self._durable}
            if self._names.get(name, 0) is not self._durable.get(name, 0)
        ]
        names = dict(self._durable)
        keep = rng.choice([0.0, 0.5, 1.0])
        for name in sorted(changed):
            if rng.random() < keep:
                if name in self._names:
                    names[name] = self._names[name]
                else:
                    names.pop(name, None)
        for old, new in self._moved:
            survivor, gone = (new, old) if rng.random() < keep else (old, new)
            names[survivor] = None
            names.pop(gone, None)
        for name in sorted(names):
            path = target / name[len(self._root) :].lstrip("/")
            parent = name.rsplit("/", 1)[0]
            if name != self._root and (parent not in names or names[parent] is not None):
                continue  # its directory did not survive
            if names[name] is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.write_bytes(self._device_bytes(names[name], rng, keep))  # type: ignore[arg-type]

    def _sync(self, name: str) -> None:
        inode = self._names[name]
        if inode is not None:
            inode.durable, inode.dirty = bytes(inode.now), set()
            return
        self._moved = [move for move in self._moved if move[0].rsplit("/", 1)[0] != name]
        for entry in {*self._names, *self._durable}:
            if entry.rsplit("/", 1)[0] == name:
                if entry in self._names:
                    self._durable[entry] = self._names[entry]
                else:
                    self._durable.pop(entry, None)

    def _rename(self, old: str, new: str) -> None:
        self._names[new] = self._names.pop(old)
        if self._names[new] is None:
            self._moved.append((old, new))
        for name in [name for name in self._names if name.startswith(old + "/")]:
            self._names[new + name[len(old) :]] = self._names.pop(name)
        # A directory carries its durable entries with it, under whichever of the two names survives.
        for name in [name for name in self._durable if name.startswith(old + "/")]:
            self._durable.setdefault(new + name[len(old) :], self._durable[name])

    @staticmethod
    def _write(inode: Inode, offset: int, data: bytes) -> None:
        if len(inode.now) < offset:
            inode.now.extend(bytes(offset - len(inode.now)))
        inode.now[offset : offset + len(data)] = data
        inode.dirty.update(range(offset // SECTOR, (offset + len(data) + SECTOR - 1) // SECTOR))

    @staticmethod
    def _resize(inode: Inode, size: int) -> None:
        inode.dirty.update(
            range(min(size, len(inode.now)) // SECTOR, max(size, len(inode.now)) // SECTOR + 1)
        )
        inode.now[size:] = bytes(max(size - len(inode.now), 0))

    @staticmethod
    def _device_bytes(inode: Inode, rng: random.Random, keep: float) -> bytes:
        """Durable bytes with some dirty sectors replaced; the size is the old or the new one."""
        if not inode.dirty:
            return inode.durable
        size = len(inode.now) if rng.random() < keep else len(inode.durable)
        data = bytearray(inode.durable[:size].ljust(size, b"\0"))
        for sector in inode.dirty:
            start, stop = sector * SECTOR, min((sector + 1) * SECTOR, size, len(inode.now))
            if start < stop and rng.random() < keep:
                data[start:stop] = inode.now[start:stop]
        return bytes(data)


def _parse(call: str, arguments: str) -> Event | None:
    texts = [bytes.fromhex(text.replace("\\x", "")) for text in _STRING.findall(arguments)]
    descriptor = _FD.match(arguments)
    where = _decode(descriptor[1]) if descriptor else ""
    if call == "openat":
        if "O_CREAT" not in arguments:
            return None
        return Event("open", texts[0].decode(), offset=0 if "O_TRUNC" in arguments else None)
    if call == "write":
        return Event("write", where, texts[0] if texts else b"")
    if call == "pwrite64":
        return Event("write", where, texts[0] if texts else b"", int(arguments.rsplit(",", 1)[1]))
    if call == "ftruncate":
        return Event("truncate", where, offset=int(arguments.rsplit(",", 1)[1]))
    if call in ("fsync", "fdatasync"):
        return Event("sync", where)
    if call in ("mkdir", "mkdirat"):
        return Event("mkdir", texts[0].decode())
    if call in ("unlink", "unlinkat", "rmdir"):
        return Event("remove", texts[0].decode())
    kind = "link" if call.startswith("link") else "rename"
    return Event(kind, texts[0].decode(), target=texts[1].decode())


def _decode(text: str) -> str:
    return bytes.fromhex(text.replace("\\x", "")).decode() if text.startswith("\\x") else text

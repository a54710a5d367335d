"""The job's meeting point: one TCPStore on global rank 0, found through a file in the attempt's directory.

No port is fixed and none is guessed: rank 0 binds port 0 on the job's interface and writes address and port by
rename; the file's name holds job and restart, so a stale one of an earlier attempt cannot match. Values carry an HMAC
under the run's token: another user who finds the port can disturb, but not plant an address or a version.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vime_hpc.errors import DeadlineError, RoleDiedError, VimeError

POLL_S = 0.05
Exchange = Callable[[bytes | None], bytes]
"""Rank 0 gives its record, the others None; every rank gets it (cluster.mpi.broadcast_record)."""
_MAC_BYTES = 32


class Rendezvous:
    """Signed keys and values that every process of one attempt sees.

    Args:
        store: the attempt's TCPStore.
        token: the run's secret, at least 32 bytes.
        host: address other processes reach rank 0 under.
        port: its TCP port.
    """

    def __init__(self, store: dist.TCPStore, token: bytes, host: str, port: int) -> None:
        self.store = store
        self.host = host
        self.port = port
        self._token = token

    @classmethod
    def open(
        cls,
        directory: Path,
        token: bytes,
        *,
        hosting: bool,
        address: str,
        timeout_s: float,
        exchange: Exchange | None = None,
    ) -> Rendezvous:
        """Host the store (global rank 0) or connect to it.

        Args:
            exchange: hands rank 0's record to the others in place of the file; called once by every rank.
        Raises:
            DeadlineError: rank 0 did not publish its address within timeout_s.
        """
        path = directory / "rendezvous.json"
        return (
            cls._host(path, token, address, timeout_s, exchange)
            if hosting
            else cls._connect(path, token, timeout_s, exchange)
        )

    @classmethod
    def _host(
        cls, path: Path, token: bytes, address: str, timeout_s: float, exchange: Exchange | None
    ) -> Rendezvous:
        # The store's own server would listen on every interface; a socket of ours listens on one.
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
        text = json.dumps({"host": address, "port": port})
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        record = json.dumps({"text": text, "mac": _mac(token, "rendezvous", text.encode()).hex()})
        part.write_text(record)
        os.replace(part, path)
        if exchange is not None:
            exchange(record.encode())
        return cls(store, token, address, port)

    @classmethod
    def _connect(
        cls, path: Path, token: bytes, timeout_s: float, exchange: Exchange | None
    ) -> Rendezvous:
        if exchange is None:
            _wait_for_file(path, timeout_s)
            record = json.loads(path.read_text())
        else:
            record = json.loads(exchange(None))
        if not hmac.compare_digest(
            _mac(token, "rendezvous", record["text"].encode()).hex(), record["mac"]
        ):
            raise VimeError(
                f"{path} is not signed with this run's token; somebody else wrote it, or RUN/token was changed"
            )
        where = json.loads(record["text"])
        store = dist.TCPStore(
            where["host"], where["port"], is_master=False, timeout=timedelta(seconds=timeout_s)
        )
        return cls(store, token, where["host"], where["port"])

    @property
    def secret(self) -> str:
        """The run's token in hexadecimal, for what signs its own values in the store."""
        return self._token.hex()

    def prefixed(self, prefix: str) -> dist.Store:
        """A corner of the store for one process group."""
        return dist.PrefixStore(prefix, self.store)

    def put(self, key: str, value: Any) -> None:
        """Publish a JSON value under a key, signed."""
        body = json.dumps(value).encode()
        signed = _mac(self._token, key, body) + body
        self.store.set(f"v/{key}", signed)  # type: ignore[arg-type]  # the stub says str, it takes bytes

    def has(self, key: str) -> bool:
        return bool(self.store.check([f"v/{key}"]))

    def get(self, key: str) -> Any:
        """The value of a key that is there.

        Raises:
            VimeError: the value is not signed with the run's token.
        """
        raw = self.store.get(f"v/{key}")
        body = raw[_MAC_BYTES:]
        if not hmac.compare_digest(_mac(self._token, key, body), raw[:_MAC_BYTES]):
            raise VimeError(
                f"rendezvous key {key!r} is not signed with this run's token: a foreign process wrote it"
            )
        return json.loads(body)

    def wait(
        self,
        key: str,
        *,
        timeout_s: float,
        who: str,
        phase: str,
        interrupted: Callable[[], None] = lambda: None,
    ) -> Any:
        """Wait for a key.

        Args:
            who: the rank that sets it, for the message.
            phase: what was going on, for the message.
            interrupted: called while waiting; raises to end the wait.
        Raises:
            DeadlineError: not there after timeout_s.
            RoleDiedError: a process of the job reported its end.
        """
        end = time.monotonic() + timeout_s
        while not self.has(key):
            interrupted()
            if self.has("failed"):
                raise RoleDiedError(
                    f"{phase}: {self.get('failed')} failed; this process ends with it"
                )
            if time.monotonic() > end:
                raise DeadlineError(
                    f"{phase}: {who} did not answer within {timeout_s:g} s (waited for {key!r}); "
                    f"look at its log"
                )
            time.sleep(POLL_S)
        return self.get(key)


def _wait_for_file(path: Path, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > end:
            raise DeadlineError(
                f"start: global rank 0 did not write {path} within {timeout_s:g} s; its log says why "
                f"it is not up"
            )
        time.sleep(POLL_S)


def _mac(token: bytes, key: str, body: bytes) -> bytes:
    return hmac.new(token, key.encode() + b"\0" + body, hashlib.sha256).digest()


def host_address(interface: str = "") -> str:
    """The IPv4 address other nodes reach this process under.

    The interface's own address when one is named; otherwise that of the host name, unless it is a loopback and the
    job spans hosts (Slurm says so), in which case the address of the default route is taken.
    """
    if interface:
        return _interface_address(interface)
    if os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1" and "SLURM_HET_SIZE" not in os.environ:
        return "127.0.0.1"
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(
            ("192.0.2.1", 9)
        )  # RFC 5737 documentation address: picks the route, sends nothing
        return str(probe.getsockname()[0])


def _interface_address(interface: str) -> str:
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = struct.pack("256s", interface[:15].encode())
        siocgifaddr = 0x8915
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), siocgifaddr, packed)[20:24])

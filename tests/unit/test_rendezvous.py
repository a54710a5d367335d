"""The meeting point: signed values, deadlines that name who is missing, one interface."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the rendezvous store is torch's")

from vime_hpc.cluster.rendezvous import Rendezvous  # noqa: E402
from vime_hpc.errors import DeadlineError, RoleDiedError, VimeError  # noqa: E402

TOKEN = b"t" * 32


def pair(directory: Path, token: bytes = TOKEN) -> tuple[Rendezvous, Rendezvous]:
    host = Rendezvous.open(directory, TOKEN, hosting=True, address="127.0.0.1", timeout_s=5)
    return host, Rendezvous.open(directory, token, hosting=False, address="", timeout_s=5)


def test_a_value_set_by_one_is_read_by_the_other(tmp_path: Path) -> None:
    host, other = pair(tmp_path)
    host.put("a", {"x": [1, 2]})
    assert other.wait("a", timeout_s=1, who="x", phase="y") == {"x": [1, 2]}
    assert other.has("a")  # not before: a store's set does not wait for the server


def test_a_foreign_value_or_file_is_refused(tmp_path: Path) -> None:
    host, other = pair(tmp_path)
    host.store.set("v/engine/0", json.dumps({"url": "http://evil"}))
    with pytest.raises(VimeError, match="not signed"):
        other.get("engine/0")
    with pytest.raises(VimeError, match="not signed"):
        Rendezvous.open(tmp_path, b"u" * 32, hosting=False, address="", timeout_s=1)


def test_a_value_moved_to_another_key_is_refused(tmp_path: Path) -> None:
    host, other = pair(tmp_path)
    host.put("weights/1", "root")
    host.store.set("v/weights/2", host.store.get("v/weights/1"))
    with pytest.raises(VimeError, match="not signed"):
        other.get("weights/2")


def test_a_wait_that_runs_out_names_who_and_what(tmp_path: Path) -> None:
    _, other = pair(tmp_path)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"start: engine-1 did not answer within 0.3 s"):
        other.wait("engine/1", timeout_s=0.3, who="engine-1", phase="start")
    assert time.monotonic() - began < 5


def test_a_missing_host_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="global rank 0 did not write"):
        Rendezvous.open(tmp_path, TOKEN, hosting=False, address="", timeout_s=0.2)


def test_a_reported_failure_ends_the_waits_of_others(tmp_path: Path) -> None:
    host, other = pair(tmp_path)
    threading.Timer(0.2, lambda: host.put("failed", "trainer-1")).start()
    with pytest.raises(RoleDiedError, match="trainer-1 failed"):
        other.wait("never", timeout_s=10, who="x", phase="y")


def test_the_store_listens_on_the_given_interface_only(tmp_path: Path) -> None:
    host, _ = pair(tmp_path)
    with (
        pytest.raises(OSError, match="refused"),
        socket.create_connection(("127.0.0.2", host.port), timeout=2),
    ):
        pass

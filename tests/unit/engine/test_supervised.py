"""A supervised server (here the stub engine) never outlives its owner and says why it did not start."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import pytest

import vime_hpc
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import EngineConfig
from vime_hpc.engine.process_guard import session_pids, shared_memory_of
from vime_hpc.engine.server import EngineServer
from vime_hpc.engine.supervised import SupervisedServer, private_directory
from vime_hpc.engine.tokens import new_token_file
from vime_hpc.errors import ConfigError, DeadlineError, EngineError
from vime_hpc.testing.stub_engine import KNOBS_ENV

STUB = "vime_hpc.testing.stub_engine"


def server(tmp_path: Path, module: str = STUB, host: str = "127.0.0.1") -> EngineServer:
    token_file = tmp_path / "token"
    if not token_file.exists():
        new_token_file(token_file)
    return EngineServer(
        EngineConfig(device="cpu"), ModelConfig(path="nowhere", dtype="float32"), vllm={}, max_model_len=64, seed=0, index=0,
        host=host, token_file=token_file, log_path=tmp_path / "logs" / "engine-0.log", module=module,
    )  # fmt: skip


def test_named_semaphores_and_shared_memory_of_a_process_are_found() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    block = shared_memory.SharedMemory(create=True, size=64)
    try:
        found = {p.name for p in shared_memory_of([os.getpid()])}
        assert f"sem.{lock._semlock.name.lstrip('/')}" in found  # type: ignore[attr-defined]
        assert block.name in found
    finally:
        block.close()
        block.unlink()


def test_a_long_temporary_directory_does_not_cost_the_engines_their_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    for base in (tmp_path, long):
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        directory = private_directory()
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(directory / str(uuid.uuid4())))
        shutil.rmtree(directory)


def test_temporary_files_of_a_server_are_gone_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    (tmp_path / "leaves_a_file.py").write_text(
        "import os, tempfile, time\n"
        "made = tempfile.mkstemp(prefix='vllm_dist_')[1]\n"
        f"open({str(tmp_path / 'made')!r}, 'w').write(made + '\\n' + os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with server(tmp_path, module="leaves_a_file") as engine:
        engine.start()
        with pytest.raises(EngineError, match="ended with code 0"):
            engine.wait_ready(30)
    made, compiled = (tmp_path / "made").read_text().splitlines()
    assert Path(made).is_relative_to(base)
    assert list(base.iterdir()) == []
    base.rmdir()
    assert (
        Path(compiled).parent == base
    )  # what is kept for the next start is not in the server's own directory


def gone_within(session: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while session_pids(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_server_starts_answers_and_stops_with_nothing_left(tmp_path: Path) -> None:
    engine = server(tmp_path)
    engine.start()
    engine.wait_ready(60)
    assert engine.poll() is None
    private, session, port = engine._private_dir, engine.pid, engine.port
    assert private.is_dir()
    assert private.stat().st_mode & 0o777 == 0o700
    assert engine.log_path.stat().st_mode & 0o777 == 0o600
    start = time.monotonic()
    engine.stop()
    assert time.monotonic() - start < 20
    assert session_pids(session) == []
    assert not private.exists()
    with socket.socket() as s:
        s.bind(("127.0.0.1", port))  # free again
    engine.stop()  # a second time does no harm


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_supervised import server
engine = server(Path({tmp!r}))
engine.start(); engine.wait_ready(60)
import os
if os.fork() == 0:
    time.sleep(30)   # a forked child holds the pipe open
    os._exit(0)
print(engine.pid, engine.port, engine._private_dir, flush=True)
time.sleep(600)
"""


def test_killing_the_owner_ends_every_process_of_the_server(tmp_path: Path) -> None:
    code = OWNER.format(tests=str(Path(__file__).parent), tmp=str(tmp_path))
    env = {**os.environ, "PYTHONPATH": str(Path(vime_hpc.__file__).parents[1])}
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    assert owner.stdout is not None
    session, port, private = owner.stdout.readline().split()
    try:
        assert len(session_pids(int(session))) >= 2  # keeper and server
        os.kill(owner.pid, signal.SIGKILL)
        assert gone_within(int(session), 10)
        assert not Path(private).exists()
        with socket.socket() as s:
            s.bind(("127.0.0.1", int(port)))
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.wait()


def test_killing_the_keeper_ends_the_server(tmp_path: Path) -> None:
    engine = server(tmp_path)
    engine.start()
    engine.wait_ready(60)
    os.kill(engine.pid, signal.SIGKILL)
    assert gone_within(engine.pid, 5)
    assert engine.poll() == -signal.SIGKILL
    engine.stop()


def test_a_server_that_dies_while_serving_is_seen_by_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KNOBS_ENV, json.dumps({"die_on": "/is_paused"}))
    engine = server(tmp_path)
    with engine:
        engine.start()
        engine.wait_ready(60)
        import http.client

        from vime_hpc.engine.tokens import read_token

        connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=5)
        headers = {"Authorization": f"Bearer {read_token(engine.token_file)}"}
        connection.request("GET", "/is_paused", headers=headers)
        with pytest.raises((http.client.HTTPException, OSError)):
            connection.getresponse()
        deadline = time.monotonic() + 10
        while engine.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert engine.poll() == 9


def test_a_server_that_cannot_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    engine = server(tmp_path, module="vime_hpc.no_such_module")
    engine.start()
    start = time.monotonic()
    with pytest.raises(
        EngineError, match=r"engine 0 ended with code 1 while starting(.|\n)*no_such_module"
    ):
        engine.wait_ready(60)
    assert time.monotonic() - start < 20


def test_a_server_that_never_answers_is_stopped_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KNOBS_ENV, json.dumps({"hang_on": "/health"}))
    engine = server(tmp_path)
    engine.start()
    with pytest.raises(DeadlineError, match="engine 0 did not answer"):
        engine.wait_ready(4)
    assert session_pids(engine.pid) == []


def test_a_port_taken_after_all_is_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]]
        real = SupervisedServer.start.__globals__["free_port"]
        monkeypatch.setitem(
            SupervisedServer.start.__globals__,
            "free_port",
            lambda host: ports.pop() if ports else real(host),
        )
        with server(tmp_path) as engine:
            engine.start()
            assert engine.port == taken.getsockname()[1]
            engine.wait_ready(60)
            assert engine.port != taken.getsockname()[1]


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_binding_to_every_address_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="may not bind"):
        server(tmp_path, host=host)

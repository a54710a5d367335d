"""Where the processes of one start put their temporary files, so that none is left in /tmp."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_of_start() -> Iterator[dict[str, str]]:
    """A new directory, removed at the end with all that is in it; yields the environment that sends processes there."""
    directory = tempfile.mkdtemp(prefix="vime-")
    try:
        yield {"TORCHINDUCTOR_CACHE_DIR": cache_of_compiled(), "TMPDIR": directory}
    finally:
        # An engine whose keeper has not cleaned up yet may remove files under our hands.
        shutil.rmtree(directory, ignore_errors=True)


def cache_of_compiled() -> str:
    """Where torch keeps what it compiled: for the next start too, so not among this one's temporary files."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given:
        return given
    try:
        user = re.sub(r"\W", "_", getpass.getuser())
    except (KeyError, OSError):  # a container's user that its password file does not know
        user = str(os.getuid())
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")

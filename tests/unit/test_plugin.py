"""Finding a user's function, and not running what is not the user's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vime_hpc.config.plugin import load_plugin
from vime_hpc.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_function_or_a_method_is_found(directory: Path) -> None:
    (directory / "plugin_good.py").write_text(
        "def f(): return 7\nclass C:\n    g = staticmethod(f)\n"
    )
    assert load_plugin("plugin_good:f", option="o")() == 7
    assert load_plugin("plugin_good:C.g", option="o")() == 7


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("plugin_bad", "pkg.module:name"),
        ("plugin_none:f", "no module plugin_none"),
        ("plugin_needs:f", "plugin_needs itself imports plugin_missing"),
        ("plugin_needs2:g", "has no g; it has f"),
        ("plugin_needs2:x", "is a int, not something to call"),
    ],
)
def test_what_cannot_be_found_is_named(directory: Path, path: str, named: str) -> None:
    (directory / "plugin_needs.py").write_text("import plugin_missing\n")
    (directory / "plugin_needs2.py").write_text("x = 1\ndef f(): ...\n")
    with pytest.raises(ConfigError, match=r"rollout\.reward") as caught:
        load_plugin(path, option="rollout.reward")
    if path.endswith(":g"):
        assert "has no g; it has" in str(caught.value)
    else:
        assert named in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_the_file_of_another_user_is_refused_before_it_runs(directory: Path) -> None:
    package = directory / "plugin_foreign"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it ran')\n")
    (package / "inner.py").write_text("def f(): ...\n")
    os.chown(package / "__init__.py", 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user id 65534"):
        load_plugin("plugin_foreign.inner:f", option="rollout.reward")
    assert "plugin_foreign" not in sys.modules

"""docs/notebooks/rollouts.ipynb runs from top to bottom on a finished run and draws what it says."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from .conftest import REPOSITORY, STEPS, Job

NOTEBOOK = REPOSITORY / "docs" / "notebooks" / "rollouts.ipynb"
PICTURES = 4
pytestmark = pytest.mark.timeout(600)


def executed(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Everything the notebook printed; its pictures lie in tmp_path afterwards. A cell that fails raises."""
    monkeypatch.setenv("RUN", str(run))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kernel = AsyncKernelManager(transport="ipc", connection_file=str(tmp_path / "kernel.json"))
    NotebookClient(
        notebook,
        kernel,
        timeout=240,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    ).execute()
    printed = ""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            printed += output.get("text", "") + data.get("text/plain", "") + "\n"
            if "image/png" in data:
                count = len(list(tmp_path.glob("*.png")))
                (tmp_path / f"{count}.png").write_bytes(base64.b64decode(data["image/png"]))
    pictures = list(tmp_path.glob("*.png"))
    assert len(pictures) == PICTURES
    assert all(picture.stat().st_size > 8_000 for picture in pictures)
    return printed


@pytest.mark.e2e
def test_the_notebook_plots_a_finished_run(
    reference: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert reference.code == 0, reference.output
    printed = executed(reference.run, monkeypatch, tmp_path)
    assert f"steps 0 to {STEPS - 1} committed" in printed
    assert "differences from metrics.jsonl" in printed


def test_the_notebook_plots_the_columns_that_a_run_of_experts_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = executed(REPOSITORY / "tests" / "golden" / "buffer-v1-all", monkeypatch, tmp_path)
    assert "differences from columns old_logprobs and rollout_logprobs" in printed
    assert "6 samples, 60 tokens" in printed


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)

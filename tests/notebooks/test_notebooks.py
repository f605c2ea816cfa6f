"""Every notebook runs from top to bottom, in its short mode (`JAXLAB_NOTEBOOK_SHORT=1`)."""

import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.slow  # the real model: minutes of compilation
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path, monkeypatch):
  monkeypatch.setenv("JAXLAB_NOTEBOOK_SHORT", "1")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
  code = [cell for cell in notebook.cells if cell.cell_type == "code"]
  assert all(cell.execution_count for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_cells_are_short_and_define_little(path):
  """Notebooks call the public API: no definitions in them, no stored output."""
  for cell in nbformat.read(path, as_version=4).cells:
    if cell.cell_type == "code":
      assert not cell.outputs and "def " not in cell.source and "class " not in cell.source

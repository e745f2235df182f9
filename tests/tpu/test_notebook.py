"""The Colab notebook: run from its first cell to its last, small, on the CPU; and kept free of outputs."""

import json
import re

import nbclient
import nbformat
import pytest

from tests.conftest import make_corpus
from tests.processes import ROOT, environment_with

NOTEBOOK = ROOT / "tpu" / "bertjax_tpu.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """(the notebook with its outputs by the cells' ids, the folder of its runs)."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "text.txt").write_text(make_corpus(80))
    environment = {
        **environment_with(),
        "IPYTHONDIR": str(folder / "ipython"),
        "BERTJAX_NOTEBOOK_STEPS": "35",
        "BERTJAX_NOTEBOOK_EPOCHS": "1",
        "BERTJAX_NOTEBOOK_CORPUS": str(folder / "text.txt"),
        "BERTJAX_NOTEBOOK_VOCABULARY": "150",
        "BERTJAX_NOTEBOOK_RUNS": str(folder / "runs"),
    }
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # As JupyterLab does, from the notebook's own folder: it has to find the repository by itself.
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute(env=environment)  # raises where a cell does
    return {cell.id: cell.get("outputs", []) for cell in notebook.cells}, folder / "runs"


def said(outputs) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_no_outputs_are_kept_in_git():
    content = json.loads(NOTEBOOK.read_text("utf-8"))
    nbformat.validate(content)
    assert content["metadata"]["kernelspec"]["name"] == "python3" and content["metadata"]["accelerator"] == "TPU"
    for cell in content["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None, cell["id"]


@pytest.mark.slow
def test_every_cell_runs(executed):
    outputs, runs = executed
    for cell, parts in outputs.items():
        assert all(part.output_type != "error" for part in parts), cell
    assert f"bertjax is in {ROOT}" in said(outputs["install"])
    assert said(outputs["devices"]).startswith("1 device(s)\n0 cpu cpu")
    assert {"checkpoints", "metrics.jsonl", "report.txt"} <= {path.name for path in (runs / "colab").iterdir()}


@pytest.mark.slow
def test_it_trains_and_plots_the_loss(executed):
    outputs, _ = executed
    assert "step 35/35 loss" in said(outputs["train"]) and "unigram baseline" in said(outputs["train"])
    assert any("image/png" in output.get("data", {}) for output in outputs["loss"])


@pytest.mark.slow
def test_it_fills_masks_and_fine_tunes(executed):
    outputs, runs = executed
    filled = said(outputs["fill"])
    assert "this function returns a [MASK] of strings" in filled and filled.count("%") == 5
    tuned = said(outputs["tune"])
    assert f"started from {runs / 'colab'}@35 (bertjax)" in tuned and "320 training examples" in tuned
    assert "step 10/10 loss" in tuned and "dev: accuracy" in tuned
    guesses = said(outputs["compare"]).splitlines()
    assert len(guesses) == 2 and all(re.search(r"\. (failure|result) \{'failure': 0\.", guess) for guess in guesses)

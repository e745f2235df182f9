"""The Colab notebook: run from its first cell to its last, small, on the CPU; and kept free of outputs."""

import json
import re

import nbclient
import nbformat
import pytest

from tests.processes import ROOT, environment_with

NOTEBOOK = ROOT / "tpu" / "bertjax_tpu.ipynb"


def test_no_outputs_are_kept_in_git():
    content = json.loads(NOTEBOOK.read_text("utf-8"))
    nbformat.validate(content)
    assert content["metadata"]["kernelspec"]["name"] == "python3" and content["metadata"]["accelerator"] == "TPU"
    for cell in content["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None, cell["id"]


@pytest.mark.slow
def test_every_cell_runs_and_prints_its_results(corpus_file, tmp_path):
    sizes = dict(STEPS=35, EPOCHS=1, CORPUS=corpus_file, VOCABULARY=150, RUNS=tmp_path)
    environment = environment_with(**{f"BERTJAX_NOTEBOOK_{name}": str(value) for name, value in sizes.items()})
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # As JupyterLab does, from the notebook's own folder: it has to find the repository by itself.
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute(env=environment | {"IPYTHONDIR": str(tmp_path / "ipython")})  # raises where a cell does
    outputs = {cell.id: cell.get("outputs", []) for cell in notebook.cells}
    assert all(part.output_type != "error" for parts in outputs.values() for part in parts)
    assert any("image/png" in output.get("data", {}) for output in outputs["loss"])
    printed = {name: "".join(part.get("text", "") for part in parts) for name, parts in outputs.items()}
    assert f"bertjax is in {ROOT}" in printed["install"]
    assert printed["devices"].startswith("1 device(s)\n0 cpu cpu")
    assert "step 35/35 loss" in printed["train"] and "unigram baseline" in printed["train"]
    assert {"checkpoints", "metrics.jsonl", "report.txt"} <= {path.name for path in (tmp_path / "colab").iterdir()}
    assert "this function returns a [MASK] of strings" in printed["fill"] and printed["fill"].count("%") == 5
    assert f"started from {tmp_path / 'colab'}@35 (bertjax)" in printed["tune"]
    assert "320 training examples" in printed["tune"]
    assert "step 10/10 loss" in printed["tune"] and "dev: accuracy" in printed["tune"]
    guesses = printed["compare"].splitlines()
    assert len(guesses) == 2 and all(re.search(r"\. (failure|result) \{'failure': 0\.", guess) for guess in guesses)

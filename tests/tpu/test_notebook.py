"""The Colab notebook: all cells run with small sizes on the CPU; the file has no outputs."""

import re

import pytest

from tests.notebooks import check_source, execute, printed
from tests.processes import ROOT

NOTEBOOK = ROOT / "tpu" / "bertjax_tpu.ipynb"


def test_no_outputs_are_kept_in_git():
    assert check_source(NOTEBOOK)["metadata"]["accelerator"] == "TPU"


@pytest.mark.slow
def test_every_cell_runs_and_prints_its_results(corpus_file, tmp_path):
    sizes = dict(STEPS=35, EPOCHS=1, CORPUS=corpus_file, VOCABULARY=150, RUNS=tmp_path)
    variables = {f"BERTJAX_NOTEBOOK_{name}": str(value) for name, value in sizes.items()}
    # As in JupyterLab, the kernel starts in the folder of the notebook, and the notebook finds the repository.
    outputs = execute(NOTEBOOK, NOTEBOOK.parent, tmp_path / "ipython", **variables)
    assert any("image/png" in output.get("data", {}) for output in outputs["loss"])
    texts = {name: printed(parts) for name, parts in outputs.items()}
    assert f"bertjax is in {ROOT}" in texts["install"]
    assert texts["devices"].startswith("1 device(s)\n0 cpu cpu")
    assert "step 35/35 loss" in texts["train"] and "unigram baseline" in texts["train"]
    assert {"checkpoints", "metrics.jsonl", "report.txt"} <= {path.name for path in (tmp_path / "colab").iterdir()}
    assert "this function returns a [MASK] of strings" in texts["fill"] and texts["fill"].count("%") == 5
    assert f"started from {tmp_path / 'colab'}@35 (bertjax)" in texts["tune"]
    assert "320 training examples" in texts["tune"]
    assert "step 10/10 loss" in texts["tune"] and "dev: accuracy" in texts["tune"]
    guesses = texts["compare"].splitlines()
    assert len(guesses) == 2 and all(re.search(r"\. (failure|result) \{'failure': 0\.", guess) for guess in guesses)

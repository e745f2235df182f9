"""The tutorial notebook of the Python API: the cells run from the first to the last, and their values are checked."""

import itertools
import json
import re

import nbclient
import nbformat
import pytest

import bertjax
from tests.notebooks import check_source, execute, printed, shown
from tests.processes import ROOT

NOTEBOOK = ROOT / "docs" / "tutorials" / "python.ipynb"
# The last cell: it prints values of the notebook as JSON.
VALUES = """
import json

norms = dict(zip(tokenizer.pieces, np.linalg.norm(word_gradient, axis=1).tolist()))
print(json.dumps({
    "rows": [len(train), len(dev), len(test)],
    "filled": [word for word, _ in filled.masks[0]],
    "evaluations": [row["step"] for row in keep_scores.rows],
    "labels": [row["label"] for row in predictions],
    "accuracy": scores.scores["accuracy"],
    "vectors": vectors.shape,
    "lengths": np.linalg.norm(vectors, axis=1).tolist(),
    "nearest": similarity.idxmax().tolist(),
    "articles": test["article"][:2].tolist(),
    "hit": [hits[0][0].text, test["article"].iloc[0]],
    "right_articles": float((test["article"] == first).mean()),
    "mined": mined.columns.tolist(),
    "wrong_negatives": int((mined["positive"] == mined["negative_1"]).sum()),
    "shapes": [logits.shape, states.shape],
    "gradients": [norms["parcel"], norms["phone"]],
    "probabilities": [row["probabilities"]["delivery"] for row in predictions],
}))
"""


def test_git_has_no_outputs_of_the_notebook():
    kinds = [cell["cell_type"] for cell in check_source(NOTEBOOK)["cells"]]
    assert kinds[0] == kinds[-1] == "markdown"
    assert ("code", "code") not in itertools.pairwise(kinds)  # an explanation is before each cell of code


@pytest.mark.slow
def test_cells_have_the_results_of_the_text(tmp_path):
    # With the optimizations of XLA: the steps of training take longer than the compilation.
    outputs = execute(NOTEBOOK, tmp_path, tmp_path / "ipython", VALUES, XLA_FLAGS="")
    values, runs = json.loads(printed(outputs["last"])), tmp_path / "runs" / "tutorial"
    assert values["rows"] == [480, 60, 60]
    better = re.search(r"unigram baseline [\d.]+ \((\d\.\d+) nats better\)", printed(outputs["pretrain"]))
    assert float(better[1]) > 1
    assert values["filled"][0] == "door"
    assert values["evaluations"] == [15, 30, 45] and "macro_f1" in shown(outputs["classify"])
    assert values["labels"] == ["delivery", "payment", "login"]
    assert values["accuracy"] >= 0.9 and values["right_articles"] >= 0.9
    assert values["vectors"] == [2, 128] and values["lengths"] == pytest.approx([1, 1], abs=1e-3)
    assert values["nearest"] == values["articles"] and values["hit"][0] == values["hit"][1]
    assert values["mined"] == ["anchor", "positive", "negative_1"] and values["wrong_negatives"] == 0
    (_, labels), (_, length, width) = values["shapes"]
    assert (labels, length, width) == (3, 8, 128)
    in_text, not_in_text = values["gradients"]
    assert in_text > 0 and not_in_text == 0
    saved = bertjax.load(runs / "for-transformers")
    assert saved.source.architecture == "BertForSequenceClassification"
    texts = ["The sofa arrived broken!"]
    assert saved.classify(texts)[0]["probabilities"]["delivery"] == pytest.approx(values["probabilities"][0], abs=0.02)
    assert len(bertjax.load(runs / "encoder").fill_mask("The [MASK].", top_k=2)[0].masks[0]) == 2


@pytest.mark.slow
def test_a_mistake_in_a_notebook_is_shown_in_one_line(tmp_path):
    notebook = nbformat.v4.new_notebook()
    path = tmp_path / "mistake.ipynb"
    notebook.cells = [nbformat.v4.new_code_cell("import bertjax\nraise bertjax.UserError('epoch = 3: no field')")]
    nbformat.write(notebook, path)
    with pytest.raises(nbclient.exceptions.CellExecutionError) as error:
        execute(path, tmp_path, tmp_path / "ipython")
    text = str(error.value)
    assert "\nUserError: epoch = 3: no field\n" in text and "Traceback" not in text

"""A user program that shows the types of bertjax. mypy checks it in .ci/run; it is never run."""

from typing import Any, assert_type

import jax
import numpy as np
from numpy.typing import NDArray

import bertjax
from bertjax.config.model_config import BertConfig
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.hooks import Hook


def use(path: str) -> None:
    model = assert_type(bertjax.load(path, dtype="float32"), bertjax.Model)
    assert_type(model.config, BertConfig)
    assert_type(model.tokenizer, Tokenizer)
    assert_type(model.params, dict[str, Any])
    filled = assert_type(model.fill_mask("the [MASK] barked"), list[bertjax.Filled])
    assert_type(filled[0].masks, list[list[tuple[str, float]]])
    assert_type(model.classify([("a fine day", "the sun shines"), "rain"])[0], bertjax.Classified)
    assert_type(model.tag(text for text in ("Anna", "Rome"))[0]["tags"], list[str])
    assert_type(model.answer("Who?", "Anna lives in Rome.")["answer"], str)
    assert_type(model.predict([("Anna opens a book.", "She reads it.", "She flies.")]), list[dict[str, Any]])
    assert_type(model.embed(["a", "b"], pool="mean"), NDArray[np.float32])
    index = assert_type(bertjax.SearchIndex.build(model, ["a", "b"], "index"), bertjax.SearchIndex)
    assert_type(index.search("a")[0][0], bertjax.Hit)
    assert_type(model.generate("a", 3), list[str])
    assert_type(model.apply(model.params, np.ones((1, 8), np.int32)), jax.Array)
    bertjax.laod  # type: ignore[attr-defined]  # noqa: B018
    model.fill_mask(3)  # type: ignore[arg-type]
    model.answer("Who?")  # type: ignore[call-arg]
    bertjax.train("quickstart", "runs/quickstart", {"seed": 1}, hooks=[Hook()])
    bertjax.train("quickstart", hooks=[print])  # type: ignore[list-item]
    bertjax.prepare("base", "records", workers=2)
    bertjax.train("classify", "runs/rows", data=[{"text": "a", "label": "b"}])
    assert_type(bertjax.evaluate("runs/mine", "test.csv", form="pairs"), bertjax.Scores)
    assert_type(bertjax.convert("runs/mine", "hf", "huggingface", license="mit"), str)
    assert_type(bertjax.mine("runs/mine", "train.csv", "mined.jsonl", negatives=2).lines, list[str])
    assert_type(bertjax.extract("runs/mine", ["a"], "a.npy", pool="mean").shape, tuple[int, int])
    assert_type(bertjax.submit("runs/mine", "test.tsv", "out.tsv"), str)
    assert_type(model.save("folder"), str)
    assert_type(model.push("me/model", private=True), str)

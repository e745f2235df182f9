"""Exported programs compute what the library does, for any rows, and need nothing of ours."""

import dataclasses
import importlib.metadata
import importlib.util
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bertjax import families, library
from bertjax.config import Compute, UserError, pretraining_config
from bertjax.tasks.exported import onnx, stablehlo
from experiments.benchmarks import installs
from tests.test_library import made


def states_of(family: str, **fields) -> library.Model:
    """Hidden states of a random model of a family, with the tokenizer of the golden one."""
    settings = pretraining_config()
    with settings.unlocked():
        size = dict(vocab_size=90, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48)
        settings.model = families.model_fields(family, **size, **fields)
    config = families.config_of(settings)
    ids = jnp.ones((1, 8), jnp.int32)
    encoder = families.of(config).model(config, Compute())
    params = nn.meta.unbox(encoder.init(jax.random.key(0), ids, ids, ids, None, method="encode")["params"])
    golden = made("BertModel").source
    return library.Model(dataclasses.replace(golden, config=config, params={"bert": params}, architecture=""))


def modern() -> library.Model:
    """Hidden states of a ModernBERT, whose layers are not alike."""
    return states_of("modernbert", local_attention=8, max_position_embeddings=40)


def loaded(folder):
    spec = importlib.util.spec_from_file_location("load", folder / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(folder)


def drawn(model, rng) -> dict[str, np.ndarray]:
    """Rows of any number and length, with padding, and types that no text has."""
    shape = rng.integers(1, 6), rng.integers(2, model.config.max_position_embeddings + 1)
    lengths = rng.integers(1, shape[1] + 1, shape[0])
    segments = (np.arange(shape[1]) < lengths[:, None]).astype(np.int32)
    ids = rng.integers(0, model.config.vocab_size, shape).astype(np.int32)
    return dict(input_ids=ids, segments=segments, token_types=rng.integers(0, 2, shape).astype(np.int32) * segments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: made("BertForMaskedLM"),
        lambda: made("BertForSequenceClassification", "classifier", 3, labels=("sea", "court", "none")),
        modern,
    ],
    ids=["words", "classes", "states"],
)
def test_programs_compute_what_the_library_does(make, tmp_path):
    model, rng = make(), np.random.default_rng(0)
    print(stablehlo.write(tmp_path / "out", model.source))
    run = loaded(tmp_path / "out")
    for _ in range(2):
        batch = drawn(model, rng)
        expected, found = np.asarray(model.apply(model.params, **batch)), run(**batch)
        assert found.shape == expected.shape and found.dtype == np.float32
        real = batch["segments"] > 0 if expected.ndim == 3 else slice(None)
        np.testing.assert_allclose(found[real], expected[real], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="there are programs for up to"):
        run(np.ones((1, model.config.max_position_embeddings + 1), np.int32))
    ids = np.array([[2, 9, 3, 0, 0]], np.int32)
    np.testing.assert_allclose(run(ids), run(ids, ids != model.tokenizer.pad_id, 0 * ids))


def modules_beside(*distributions: str) -> set[str]:
    """The modules of all that is installed but these packages and what they require; with ours."""
    kept, left = set(), [*distributions]
    while left:
        name = canonicalize_name(left.pop())
        if name not in kept:
            kept.add(name)
            required = map(Requirement, importlib.metadata.requires(name) or ())
            left += [each.name for each in required if not each.marker or each.marker.evaluate({"extra": ""})]
    owners = importlib.metadata.packages_distributions()
    return {"bertjax", *(module for module, names in owners.items() if not kept & set(map(canonicalize_name, names)))}


def test_they_need_what_jax_requires_and_flatbuffers_only(tmp_path):
    """And are written by what we require: TensorFlow, which brings flatbuffers as well, is not everywhere."""
    assert "flatbuffers" in {Requirement(each).name for each in installs.requirements([])}
    model = made("BertForMaskedLM")
    stablehlo.write(tmp_path / "out", model.source)
    ids = np.array([[2, 9, 11, 3]], np.int32)
    missing = modules_beside("jax", "flatbuffers")
    assert {"flax", "etils", "zstandard"} < missing and not {"jax", "jaxlib", "numpy", "flatbuffers"} & missing
    script = f"""
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, {str(tmp_path / "out")!r})
import load
print(load.load()([[2, 9, 11, 3]]).argmax(-1).tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == str(np.asarray(model.apply(model.params, ids)).argmax(-1).tolist()), done.stderr


def test_the_folder_that_one_is_in_is_written_if_it_is_empty(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    stablehlo.write(".", made("BertForMaskedLM").source)
    assert (tmp_path / "here/load.py").exists() and [each.name for each in tmp_path.iterdir()] == ["here"]


def test_what_cannot_be_exported_is_said_in_a_line(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for write in (stablehlo.write, onnx.write):  # before it converts, and so without ONNX's packages as well
        with pytest.raises(UserError, match="exists and is not empty"):
            write(tmp_path / "full", made("BertForMaskedLM").source)
    with pytest.raises(UserError, match="several choices"):
        stablehlo.write(tmp_path / "out", made("BertForMultipleChoice", "classifier", 1).source)

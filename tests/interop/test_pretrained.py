"""Starting from a checkpoint, and using a checkpoint, in any format."""

import dataclasses
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest
import safetensors.numpy

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.distributed.mesh import make_mesh
from bertjax.inference import hidden_states
from bertjax.inference.fill_mask import fill_masks
from bertjax.inference.hidden_states import compute_hidden_states
from bertjax.interop import huggingface, initialization, pretrained
from bertjax.models.families import encoder_of, model_fields
from bertjax.models.heads import BertForMaskedLM
from bertjax.nn.layer_pooling import WITHOUT_WEIGHTS
from bertjax.training.step import Program
from tests.conftest import one_device_mesh, pretraining_task
from tests.interop.test_golden import GOLDEN, edit, only, same


@pytest.fixture(scope="module")
def golden():
    return pretrained.read_pretrained(GOLDEN)


def config_for(golden, path=GOLDEN):
    config = pretraining_config()
    config.model.update(dataclasses.asdict(golden.config), hidden_act="gelu_new")
    config.stages, config.batch_size, config.init_checkpoint = named_stages(short=stage(1, 16, 3)), 8, str(path)
    return config


def random_params(config):
    """Returns random params of the model that a run with this config trains."""
    shapes = jax.eval_shape(pretraining_task(config, one_device_mesh(config), None).init_params, jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype), nn.meta.unbox(shapes))


def test_an_unused_tokenizer_flag_is_refused(golden):
    """The tokenizer of the checkpoint is used."""
    for section, value in (("lowercase", False), ("kind", "sentencepiece")):
        config = config_for(golden)
        config.tokenizer[section] = value
        for use in (initialization.adopt, initialization.require_tokenizer):
            with pytest.raises(UserError, match=rf"config.tokenizer.{section} = {value!r}: has no effect, since"):
                use(config)
    assert initialization.require_tokenizer(config_for(golden)).fingerprint == golden.tokenizer.fingerprint


@pytest.mark.slow
def test_params_are_sharded_like_the_initial_params(golden):
    config = config_for(golden)
    config.mesh.update(data=2, fsdp=2, tensor=2)
    mesh = make_mesh(config)
    params = Program(pretraining_task(config, mesh, None), config, mesh).init(jax.random.key(0)).params
    loaded = initialization.initialize(params, GOLDEN)
    assert same(loaded, golden.params)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, loaded, params))


def test_missing_arrays_stay_fresh_and_unknown_arrays_are_named(golden, tmp_path, capsys):
    shutil.copytree(GOLDEN, tmp_path / "bare")
    path = tmp_path / "bare" / "model.safetensors"
    tensors = {n: x for n, x in safetensors.numpy.load_file(path).items() if not n.startswith("cls.")}
    safetensors.numpy.save_file(tensors | {"adapter.bias": np.ones(2, np.float32)}, path)
    params = random_params(config_for(golden))
    loaded = initialization.initialize(params, tmp_path / "bare")
    printed = capsys.readouterr().out
    assert "19 of 26 arrays loaded; initialized at random: masked_lm/bias, masked_lm/dense/bias" in printed
    assert printed.rstrip().endswith("not used: adapter.bias")
    assert same(loaded, params | {"bert": golden.params["bert"]})


POOLER_AND_HEAD = (
    "bert/pooler/dense/bias, bert/pooler/dense/kernel, next_sentence/dense/bias, next_sentence/dense/kernel"
)


@pytest.mark.parametrize(
    "has_pairs, next_sentence, summary",
    [
        (True, "pairs", "26 of 26 arrays loaded"),
        (True, "none", f"22 of 22 arrays loaded; not used: {POOLER_AND_HEAD}"),
        (False, "none", "22 of 22 arrays loaded"),
        (False, "order", f"22 of 26 arrays loaded; initialized at random: {POOLER_AND_HEAD}"),
    ],
)
def test_a_run_with_pairs_has_pooler_and_head(golden, has_pairs, next_sentence, summary, tmp_path, capsys):
    path = GOLDEN if has_pairs else tmp_path
    if not has_pairs:
        huggingface.write(tmp_path, golden.config, only(golden.params, "masked_lm"), golden.tokenizer)
    config = config_for(golden, path)
    config.data.next_sentence = next_sentence
    params = random_params(config)
    loaded = pretrained.flattened(initialization.initialize(params, path))
    assert capsys.readouterr().out == f"started from {path} (huggingface): {summary}\n"
    fresh, golden_arrays = pretrained.flattened(params), pretrained.flattened(golden.params)
    assert loaded.keys() == fresh.keys()
    for name in loaded:
        assert (loaded[name] == (fresh if not has_pairs and name in POOLER_AND_HEAD else golden_arrays)[name]).all(), (
            name
        )


def test_adoption_sets_the_fields_of_the_checkpoint(golden):
    config = config_for(golden)
    initialization.adopt(config)
    assert config.model.hidden_act == "gelu"
    assert config.tokenizer.path == str(GOLDEN / "vocab.txt") and config.tokenizer.lowercase
    config_with_tokenizer = config_for(golden)
    config_with_tokenizer.tokenizer.path = "mine.txt"
    initialization.adopt(config_with_tokenizer)
    assert config_with_tokenizer.tokenizer.path == "mine.txt"


def test_another_model_size_is_refused_with_the_matching_flags(golden):
    config = config_for(golden)
    config.model.update(hidden_size=64, num_hidden_layers=3)
    with pytest.raises(UserError) as error:
        initialization.adopt(config)
    assert str(error.value) == (
        f"config.model.hidden_size = 64: {GOLDEN} has 32; set --config.model.hidden_size=32 "
        f"--config.model.num_hidden_layers=2"
    )
    config.model = model_fields("modernbert")
    with pytest.raises(UserError, match=r"config.model.family = 'modernbert': .* has 'bert'; choose an experiment"):
        initialization.adopt(config)


def test_a_padded_vocabulary_is_read(golden, tmp_path):
    """Some checkpoints pad the vocabulary: the model has more embeddings than the tokenizer has tokens."""
    shutil.copytree(GOLDEN, tmp_path / "padded")
    path = tmp_path / "padded" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        x = tensors[name]
        tensors[name] = np.concatenate([x, np.ones((5, *x.shape[1:]), x.dtype)])
    safetensors.numpy.save_file(tensors, path)
    edit(tmp_path / "padded" / "config.json", vocab_size=golden.config.vocab_size + 5)
    read = pretrained.read_pretrained(tmp_path / "padded")
    assert (read.config.vocab_size, read.tokenizer.vocab_size) == (32, 27)

    filled = next(fill_masks(BertForMaskedLM(read.config), read.params, read.tokenizer, ["the [MASK]"], top_k=50))
    assert len(filled.masks[0]) == 27


TEXTS = ["the captain saw a whale .", "storm", "the ship " * 30, "left and stayed near the harbour"]


@pytest.mark.slow
def test_hidden_states_are_the_layers_of_the_paper(golden):
    """The expected states are computed from single texts."""
    model, tokenizer = encoder_of(dataclasses.replace(golden.config, num_hidden_layers=5)), golden.tokenizer
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), *3 * [np.ones((1, 24), np.int32)])["params"])
    encode = jax.jit(lambda *x: model.apply({"params": params}, *x, every_layer=True, method="encode")[:, 0])
    hidden = {
        choice: list(compute_hidden_states(model, params, tokenizer, TEXTS, choice)) for choice in WITHOUT_WEIGHTS
    }
    for row, text in enumerate(TEXTS):
        ids = [tokenizer.cls_id, *tokenizer.encode(text).ids[:22], tokenizer.sep_id]
        padded = np.pad([ids], ((0, 0), (0, 24 - len(ids))))
        layers = encode(padded, np.arange(24)[None] < len(ids), np.zeros_like(padded))[:, : len(ids)]
        expected = {
            "embeddings": layers[0],
            "last": layers[5],
            "second_to_last": layers[4],
            "sum_last_four": layers[2:].sum(0),
            "concat_last_four": np.concatenate(layers[2:], axis=-1),
            "sum_all": layers[1:].sum(0),
        }
        for choice in WITHOUT_WEIGHTS:
            np.testing.assert_allclose(hidden[choice][row], expected[choice], atol=1e-5, err_msg=choice)


def test_features_are_written_in_chunks(golden, tmp_path, monkeypatch):
    model, params, path = encoder_of(golden.config), golden.params["bert"], tmp_path / "new/f.npz"
    texts = [*TEXTS, ""] * 9
    monkeypatch.setattr(hidden_states, "PORTION", 100)
    arguments = (model, params, golden.tokenizer)
    written = hidden_states.write_hidden_states(path, *arguments, lambda: iter(texts), "last")
    expected = [states for text in [*TEXTS, ""] for states in compute_hidden_states(*arguments, [text], "last")] * 9
    assert written == ((sum(map(len, expected)), golden.config.hidden_size), 45, 9)
    with np.load(path) as arrays:
        parts = np.split(arrays["hidden"], arrays["offsets"][1:-1])
        assert arrays.keys() == {"hidden", "offsets"} and arrays["offsets"][-1] == len(arrays["hidden"])
    for part, wanted in zip(parts, expected, strict=True):
        np.testing.assert_allclose(part, wanted, atol=1e-5)

    before, calls = path.read_bytes(), iter([texts, texts[:-1]])
    with pytest.raises(UserError, match="--input: the file changed during the computation"):
        hidden_states.write_hidden_states(path, *arguments, lambda: next(calls), "last")
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_weights_in_an_object_store_are_copied_locally_while_they_are_read():
    class Remote:
        name = huggingface.WEIGHTS

        def __str__(self):
            return f"gs://bucket/{self.name}"

        def copy(self, to):
            return type(to)(shutil.copy(GOLDEN / self.name, to))

    with huggingface._local(Remote()) as path:
        assert path.read_bytes() == (GOLDEN / huggingface.WEIGHTS).read_bytes()
    assert not path.exists()

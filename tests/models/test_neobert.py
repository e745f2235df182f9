"""NeoBERT compared with a NumPy implementation that reads the tensors of the published layout."""

import json

import numpy as np
import pytest
import safetensors.numpy

from bertjax.common.errors import UserError
from bertjax.interop import conversion, pretrained
from bertjax.models.heads import BertForMaskedLM, BertForSequenceClassification, word_logits
from bertjax.models.neobert.config import NeoBertConfig
from bertjax.models.neobert.huggingface import FORMAT

WORDS, HIDDEN, LAYERS, HEADS, GATE, LENGTH = 50, 24, 2, 3, 16, 11
SIZE = HIDDEN // HEADS
CODE = {
    "AutoConfig": "model.NeoBERTConfig",
    "AutoModel": "model.NeoBERT",
    "AutoModelForMaskedLM": "model.NeoBERTLMHead",
}
# The published config.json, with other sizes.
FIELDS = {
    "architectures": ["NeoBERTLMHead"], "auto_map": CODE, "classifier_init_range": 0.02, "decoder_init_range": 0.02,
    "dim_head": SIZE, "embedding_init_range": 0.02, "hidden_size": HIDDEN, "intermediate_size": 24,
    "kwargs": {"classifier_init_range": 0.02, "trust_remote_code": True}, "max_length": 64, "model_type": "neobert",
    "norm_eps": 1e-5, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "pad_token_id": 0,
    "pretrained_model_name_or_path": "google-bert/bert-base-uncased", "torch_dtype": "float32",
    "transformers_version": "4.48.2", "trust_remote_code": True, "vocab_size": WORDS,
}  # fmt: skip


def tensors_of(head):
    """Returns random tensors with the names and shapes of a published folder."""
    rng = np.random.default_rng(0)
    shapes = {"model.encoder.weight": (WORDS, HIDDEN), "model.layer_norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        of_layer = {
            "attention_norm.weight": (HIDDEN,), "qkv.weight": (3 * HIDDEN, HIDDEN), "wo.weight": (HIDDEN, HIDDEN),
            "ffn_norm.weight": (HIDDEN,), "ffn.w12.weight": (2 * GATE, HIDDEN), "ffn.w3.weight": (HIDDEN, GATE),
        }  # fmt: skip
        shapes |= {f"model.transformer_encoder.{number}.{name}": shape for name, shape in of_layer.items()}
    if head == "LMHead":
        shapes |= {"decoder.weight": (WORDS, HIDDEN), "decoder.bias": (WORDS,)}
    if head == "ForSequenceClassification":
        shapes |= {"dense.weight": (HIDDEN, HIDDEN), "dense.bias": (HIDDEN,)}
        shapes |= {"classifier.weight": (3, HIDDEN), "classifier.bias": (3,)}
    return {name: np.float32(("norm" in name) + 0.3 * rng.normal(size=shape)) for name, shape in shapes.items()}


def normalized(x, scale):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def rotated(x):
    """Multiplies pairs of neighbours, as complex numbers, by exp(i angle): `[length, heads, size]`."""
    angles = np.arange(len(x))[:, None] / 10_000 ** (np.arange(0, SIZE, 2) / SIZE)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def states_of(tensors, ids):
    """Returns the hidden states of one text `[length, hidden]`."""
    x = tensors["model.encoder.weight"][ids].astype(np.float64)
    for number in range(LAYERS):
        layer = {
            name.split(f"encoder.{number}.")[-1]: tensor
            for name, tensor in tensors.items()
            if f"encoder.{number}." in name
        }
        fused = normalized(x, layer["attention_norm.weight"]) @ layer["qkv.weight"].T
        query, key, value = np.split(fused.reshape(len(x), HEADS, 3 * SIZE), 3, axis=-1)
        scores = np.exp(np.einsum("qhd,khd->hqk", rotated(query), rotated(key)) / np.sqrt(SIZE))
        context = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), value)
        x = x + context.reshape(len(x), HIDDEN) @ layer["wo.weight"].T
        gate, linear = np.split(normalized(x, layer["ffn_norm.weight"]) @ layer["ffn.w12.weight"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * linear) @ layer["ffn.w3.weight"].T
    return normalized(x, tensors["model.layer_norm.weight"])


@pytest.mark.parametrize("head", ["", "LMHead", "ForSequenceClassification"])
def test_a_published_folder_gives_the_states_of_the_definition_and_round_trips(head, tmp_path):
    folder, tensors = tmp_path / "published", tensors_of(head)
    folder.mkdir()
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    fields = FIELDS | {"architectures": [f"NeoBERT{head}"]} | (labels if "Classification" in head else {})
    (folder / "config.json").write_text(json.dumps(fields))
    stored = tensors if head else {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    source = pretrained.read_pretrained(folder)
    assert source.config == NeoBertConfig(WORDS, HIDDEN, LAYERS, HEADS, GATE, 64)
    assert not source.ignored and source.predicts_words == (head == "LMHead")

    ids, sizes = np.random.default_rng(1).integers(1, WORDS, (2, LENGTH)), (LENGTH, 7)
    inside = (np.arange(LENGTH) < np.array(sizes)[:, None]).astype(np.int32)
    places = np.tile(np.arange(LENGTH), (2, 1))
    inputs = ids, inside, 0 * ids

    def predict(model):
        states = model.bert.encode(*inputs)
        if head == "ForSequenceClassification":
            return states, model(*inputs)
        return states, word_logits(model.bert, model.masked_lm, states, places) if head else None

    is_classifier = head == "ForSequenceClassification"
    model = BertForSequenceClassification(source.config, 3) if is_classifier else BertForMaskedLM(source.config)
    states, logits = model.apply({"params": source.params}, method=predict)
    for row, size in enumerate(sizes):
        expected = states_of(tensors, ids[row, :size])
        np.testing.assert_allclose(states[row, :size], expected, atol=1e-5)
        if head == "LMHead":
            words = expected @ tensors["decoder.weight"].T + tensors["decoder.bias"]
            np.testing.assert_allclose(logits[row, :size, :WORDS], words, atol=1e-4)
        if is_classifier:
            pooled = np.tanh(expected[0] @ tensors["dense.weight"].T + tensors["dense.bias"])
            expected = pooled @ tensors["classifier.weight"].T + tensors["classifier.bias"]
            np.testing.assert_allclose(logits[row], expected, atol=1e-5)

    for source, target, form in (("published", "ours", "bertjax"), ("ours", "back", "huggingface")):
        assert "left out" not in conversion.convert(tmp_path / source, tmp_path / target, form)
    written = safetensors.numpy.load_file(tmp_path / "back/model.safetensors")
    assert written.keys() == stored.keys()
    assert all(np.array_equal(written[name], stored[name]) for name in stored)
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert back["auto_map"]["AutoModelForMaskedLM"] == "chandar-lab/NeoBERT--model.NeoBERTLMHead"
    unused = {"auto_map", "kwargs", "pretrained_model_name_or_path", "trust_remote_code", "transformers_version"}
    unused |= {"torch_dtype", "classifier_init_range"}
    assert all(back[name] == value for name, value in fields.items() if name not in unused)


@pytest.mark.parametrize("stated, size", [(3072, 2048), (24, 16), (25, 16), (26, 24)])
def test_the_size_of_the_gate_is_two_thirds_rounded_up_to_a_multiple_of_8(stated, size, tmp_path):
    config = FORMAT.read_config(tmp_path / "config.json", FIELDS | {"intermediate_size": stated})
    assert config.intermediate_size == size
    assert FORMAT.read_config(tmp_path, FORMAT.to_fields(config)) == config


def test_tensors_of_another_layout_are_refused(tmp_path):
    tensors = tensors_of("LMHead")
    both = tensors.pop("model.transformer_encoder.0.ffn.w12.weight")
    tensors |= {f"model.transformer_encoder.0.ffn.w{i + 1}.weight": x for i, x in enumerate(np.split(both, 2))}
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"encoder.0.ffn.w12.weight is missing; expected the tensors of a NeoBERT"):
        pretrained.read_pretrained(tmp_path)

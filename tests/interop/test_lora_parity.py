"""LoRA compared with PEFT at equal weights: logits, loss, and the gradients of A and B."""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from bertjax.config.model_config import BertConfig, Compute, Lora
from bertjax.interop import huggingface, peft_writer
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.heads import BertForSequenceClassification, BertForTokenClassification
from bertjax.nn.ops import low_rank

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra_packages

CONFIG = BertConfig(
    vocab_size=128, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, hidden_act="gelu",
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
LORA = Lora(3, 12.0, 0.0, ("query", "value", "attention/output", "intermediate", "output"))
# The bertjax module in a layer and its part -> the PEFT module.
MODULES = {
    (("attention", "query_key_value"), 0): "attention.self.query",
    (("attention", "query_key_value"), 1): "attention.self.value",
    (("attention", "output"), None): "attention.output.dense",
    (("intermediate",), None): "intermediate.dense",
    (("output",), None): "output.dense",
}


def matrices(params):
    """Converts a bertjax tree to {(layer, PEFT module, "A" or "B"): matrix in PyTorch's layout}."""
    arrays, flat = {}, flatten_dict(params)
    for (module, part), name in MODULES.items():
        a, b = (flat["bert", "encoder", "layers", *module, f"lora_{letter}"] for letter in "ab")
        for layer in range(2):
            one = a[layer] if part is None else a[layer][:, part]
            other = b[layer] if part is None else b[layer][part]
            arrays[layer, name, "A"] = np.asarray(one).reshape(-1, LORA.rank).T
            arrays[layer, name, "B"] = np.asarray(other).reshape(LORA.rank, -1).T
    return arrays


def test_loss_and_gradients_equal_peft(tmp_path):
    rng = np.random.default_rng(0)
    model = BertForSequenceClassification(CONFIG, 3, Compute(lora=LORA))
    ids, lengths = rng.integers(5, 128, (4, 10)), np.array([10, 7, 4, 9])
    mask = (np.arange(10) < lengths[:, None]).astype(np.int32)
    arguments, labels = (ids, mask, np.zeros_like(ids)), np.array([0, 2, 1, 1])
    shapes = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), *arguments)["params"])
    params = jax.tree.map(lambda x: np.float32(rng.normal(0, 0.2, x.shape)), shapes)

    plain = unflatten_dict({path: x for path, x in flatten_dict(params).items() if "lora" not in path[-1]})
    huggingface.write(
        tmp_path, CONFIG, plain, None, "BertForSequenceClassification", huggingface.Metadata(("a", "b", "c"))
    )
    their_model = transformers.BertForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    names = sorted({name.removeprefix("attention.self.") for name in MODULES.values()})
    their_model = peft.get_peft_model(their_model, peft.LoraConfig(r=3, lora_alpha=12, target_modules=names)).eval()
    weights = {}
    for name, weight in their_model.named_parameters():
        if "lora_" in name:
            layer, _, rest = name.partition(".layer.")[2].partition(".")
            module, _, which = rest.rpartition(".lora_")
            weights[int(layer), module, which[0]] = weight
    our_arrays = matrices(params)
    assert weights.keys() == our_arrays.keys()
    with torch.no_grad():
        for key, weight in weights.items():
            weight.copy_(torch.tensor(our_arrays[key]))
    inputs = dict(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), labels=torch.tensor(labels))
    expected = their_model(**inputs)
    expected.loss.backward()

    @jax.jit
    def loss_of(params):
        logits = model.apply({"params": params}, *arguments)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    np.testing.assert_allclose(logits, expected.logits.detach(), atol=1e-5)
    np.testing.assert_allclose(loss, expected.loss.item(), rtol=1e-5)
    for key, gradient in matrices(gradients).items():
        assert np.abs(gradient).max() > 1e-5
        np.testing.assert_allclose(gradient, weights[key].grad, atol=1e-6, rtol=1e-4, err_msg=str(key))
    merged = their_model.merge_and_unload()
    layers = low_rank.merge_updates(params, low_rank.updates_of(params, LORA))["bert"]["encoder"]["layers"]
    our_arrays = layers["attention"]["query_key_value"]["kernel"]
    query = merged.bert.encoder.layer[1].attention.self.query.weight.detach().numpy()
    np.testing.assert_allclose(our_arrays[1, :, 0].reshape(16, 16), query.T, atol=1e-6)


def test_initial_a_equals_peft_and_initial_b_is_zero():
    model = BertForSequenceClassification(CONFIG, 3, Compute(lora=LORA))
    ids = np.ones((1, 4), np.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), ids, ids, ids)["params"])
    their_layer = torch.nn.Linear(16, 16)
    their_layer = peft.tuners.lora.Linear(their_layer, "default", config=peft.LoraConfig(r=64), r=64, lora_alpha=1)
    spread = their_layer.lora_A["default"].weight.abs().max().item()
    for (_, module, which), x in matrices(params).items():
        if which == "B":
            assert (x == 0).all()
        elif "output.dense" not in module or module.startswith("attention"):  # of 16 inputs
            assert 0.8 * spread < np.abs(x).max() <= 0.25 + 1e-6 and np.abs(x.mean()) < 0.1


@pytest.mark.parametrize("family, architecture", [
    ("bert", "BertForSequenceClassification"), ("roberta", "RobertaForSequenceClassification"),
    ("modernbert", "ModernBertForSequenceClassification"), ("bert", "BertForTokenClassification"),
    ("nomic_bert", "NomicBertForTokenClassification"), ("gte", "GteForSequenceClassification"),
    ("jina_embeddings_v3", "JinaEmbeddingsV3ForSequenceClassification"),
])  # fmt: skip
def test_peft_loads_an_adapter_onto_the_base_model(tmp_path, family, architecture):
    """The logits equal the logits of the merged model."""
    sizes = dict(vocab_size=128, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    config = families.config_of(ConfigDict({"model": families.model_fields(family, **sizes)}))
    lora = Lora(2, 6.0, 0.1, ("query", "value", "output"))
    make = BertForTokenClassification if "Token" in architecture else BertForSequenceClassification
    rng, ids = np.random.default_rng(1), np.arange(5, 29).reshape(2, 12)
    shapes = jax.eval_shape(make(config, 3, Compute(lora=lora)).init, jax.random.key(0), ids, ids * 0 + 1, ids * 0)
    params = jax.tree.map(lambda x: np.float32(rng.normal(0, 0.2, x.shape)), nn.meta.unbox(shapes["params"]))
    updates = low_rank.updates_of(params, lora)
    whole, before = low_rank.merge_updates(params, updates), low_rank.merge_updates(params, {})
    before["classifier"] = jax.tree.map(np.zeros_like, before["classifier"])  # the head of the base is not used
    names, fields = ("a", "b", "c"), dict(settings=ConfigDict({"lora": {"dropout": 0.1}}), updates=updates)
    source = Pretrained("", "bertjax", config, whole, None, [], architecture, names, **fields)
    for name, params_of_model in (("before", before), ("whole", whole)):
        huggingface.write(tmp_path / name, config, params_of_model, None, architecture, huggingface.Metadata(names))
    (tmp_path / "adapter").mkdir()
    peft_writer.write(tmp_path / "adapter", source, architecture)
    their_class = getattr(transformers, architecture)
    load = functools.partial(their_class.from_pretrained, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(load(tmp_path / "before"), tmp_path / "adapter")
    inputs = dict(input_ids=torch.tensor(ids), attention_mask=torch.ones_like(torch.tensor(ids)))
    with torch.no_grad():
        expected = load(tmp_path / "whole").eval()(**inputs).logits
        logits = adapted.eval()(**inputs).logits
        plain = load(tmp_path / "before").eval()(**inputs).logits
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert np.abs(plain - expected).max() > 1e-2

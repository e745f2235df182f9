"""Every family compared with transformers at equal weights: states, logits, gradients, all classes, and round trips."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, Compute
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.models import families
from bertjax.models.albert.config import AlbertConfig
from bertjax.models.deberta_v2.attention import buckets_of
from bertjax.models.deberta_v2.config import DebertaV2Config
from bertjax.models.distilbert.config import DistilBertConfig
from bertjax.models.electra.config import ElectraConfig
from bertjax.models.eurobert.config import EuroBertConfig
from bertjax.models.gte.config import GteConfig
from bertjax.models.heads import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    count_parameters,
    word_logits,
)
from bertjax.models.jina_embeddings_v3.config import JinaEmbeddingsV3Config
from bertjax.models.megatron_bert.config import MegatronBertConfig
from bertjax.models.modernbert.config import ModernBertConfig
from bertjax.models.mpnet.config import MPNetConfig
from bertjax.models.nomic_bert.config import NomicBertConfig
from bertjax.models.roberta.config import RobertaConfig
from bertjax.models.ultrabert.config import UltraBertConfig
from bertjax.models.xlm_roberta_xl.config import XlmRobertaXlConfig
from bertjax.models.xlnet.config import XlnetConfig
from bertjax.models.xlnet.family import FAMILY as XLNET
from bertjax.models.xlnet.model import XlnetModel
from bertjax.nn.ops.recurrent_memory import RecurrentMemory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra_packages

SIZES = dict(vocab_size=150, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
POSITIONED = SIZES | dict(max_position_embeddings=64)
WITH_OFFSET = POSITIONED | dict(position_offset=2)
OF_ROBERTA = SIZES | dict(max_position_embeddings=66, type_vocab_size=1, layer_norm_eps=1e-5)
# The first layers, layer groups, and the remaining layers.
LAYERS = dict(num_hidden_layers=6, local_attention=16, attention_dropout=0.2)
KINDS = ["full_attention", "sliding_attention"] * 3
SPECIAL = dict(pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
ROPE = dict(rope_type="default", rope_theta=250_000.0)
TYPED = dict(num_hidden_layers=4, num_key_value_heads=2, prediction_head_size=24, sliding_window=4)
# The fields of DeBERTa-v3, with fewer buckets. The distances of a text are more than the buckets.
BUCKETS = dict(share_att_key=True, position_buckets=8, norm_rel_ebd="layer_norm", position_biased_input=False)
OLD_DEBERTA = dict(
    share_att_key=False, position_buckets=-1, max_relative_positions=5, norm_rel_ebd="none", conv_kernel_size=3,
    position_biased_input=True, type_vocab_size=2, legacy=False,
)  # fmt: skip
SHARED = dict(num_hidden_layers=4, num_hidden_groups=2, embedding_size=16)
# The prefix of the transformers classes, the fields of their config, and the bertjax config of the same model.
MODELS = {
    "bert": ("Bert", POSITIONED, BertConfig(**POSITIONED, hidden_act="gelu")),
    "roberta": ("Roberta", OF_ROBERTA, RobertaConfig(**WITH_OFFSET)),
    "xlm-roberta": ("XLMRoberta", OF_ROBERTA, RobertaConfig(**WITH_OFFSET, variant="xlm-roberta")),
    "camembert": ("Camembert", OF_ROBERTA, RobertaConfig(**WITH_OFFSET, variant="camembert")),
    "xlm-roberta-xl": ("XLMRobertaXL", OF_ROBERTA, XlmRobertaXlConfig(**WITH_OFFSET)),
    "distilbert": (
        "DistilBert", dict(vocab_size=150, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64),
        DistilBertConfig(**POSITIONED),
    ),
    "electra": ("Electra", POSITIONED | dict(embedding_size=16), ElectraConfig(**POSITIONED, embedding_size=16)),
    "albert": (
        "Albert", POSITIONED | SHARED, AlbertConfig(**POSITIONED | SHARED),
    ),
    "modernbert": (
        "ModernBert", POSITIONED | LAYERS | SPECIAL | dict(layer_types=KINDS),
        ModernBertConfig(
            **POSITIONED | dict(num_hidden_layers=6, local_attention=16, global_attn_every_n_layers=2),
            attention_output_dropout_prob=0.2,
        ),
    ),
    "eurobert": (
        "EuroBert", SIZES | dict(num_key_value_heads=2, rope_parameters=ROPE, pad_token_id=0),
        EuroBertConfig(**SIZES, num_key_value_heads=2, head_dim=8),
    ),
    "ultrabert": (
        "Ultrabert",
        SIZES | TYPED | dict(layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")]),
        UltraBertConfig(**SIZES | TYPED, head_dim=8, layer_types="sliding,sliding,full"),
    ),
    "deberta-v2": (
        "DebertaV2", POSITIONED | BUCKETS | dict(relative_attention=True, pos_att_type=["p2c", "c2p"]),
        DebertaV2Config(**POSITIONED | BUCKETS),
    ),
    "mpnet": (
        "MPNet", SIZES | dict(max_position_embeddings=302, layer_norm_eps=1e-5),
        MPNetConfig(**WITH_OFFSET | dict(max_position_embeddings=300)),
    ),
    "nomic-bert": ("NomicBert", POSITIONED, NomicBertConfig(**POSITIONED)),
    "gte": ("Gte", POSITIONED, GteConfig(**POSITIONED)),
    "jina-embeddings-v3": ("JinaEmbeddingsV3", POSITIONED, JinaEmbeddingsV3Config(**POSITIONED)),
    "megatron-bert": ("MegatronBert", POSITIONED, MegatronBertConfig(**POSITIONED)),
    "xlnet": (
        "XLNet", dict(vocab_size=150, d_model=32, n_layer=2, n_head=4, d_inner=48, mem_len=None), XlnetConfig(**SIZES),
    ),
}  # fmt: skip
PADDED_BY_1 = ("camembert", "mpnet", "gte", "jina-embeddings-v3")  # and all RoBERTas
# {`rope_scaling` in bertjax: `rope_parameters` in transformers}
SCALINGS = {
    "linear factor=4.0": dict(rope_type="linear", factor=4.0),
    "llama3 factor=8.0 low_freq_factor=1.0 high_freq_factor=4.0 original_length=32": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "yarn factor=4.0 original_length=16 beta_fast=32.0 beta_slow=1.0": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16
    ),
}
# The bertjax model of a BERT class with a fine-tuned head.
HEADS = {
    "ForPreTraining": BertForPreTraining,
    "ForSequenceClassification": functools.partial(BertForSequenceClassification, labels=3),
    "ForTokenClassification": functools.partial(BertForTokenClassification, labels=3),
    "ForQuestionAnswering": BertForQuestionAnswering,
    "ForMultipleChoice": functools.partial(BertForSequenceClassification, labels=1),
}
# The names of RoBERTa tensors that transformers may rename.
TIED = {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"}
# The XLNet classes whose names differ from BERT's classes.
BERTS = {"LMHeadModel": "ForMaskedLM", "ForQuestionAnsweringSimple": "ForQuestionAnswering"}


def save_theirs(folder, name: str, head: str, **fields):
    """Saves a transformers model whose params are neither 0 nor 1."""
    prefix, their_fields, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}{head}")(
        getattr(transformers, f"{prefix}Config")(**their_fields | fields)
    ).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(folder)
    model.set_attn_implementation("eager")  # the only implementation that returns attention
    return model


def batch_of(name: str, length: int):
    """Returns (ids, attention mask, token types) `[2, length]`, and the arguments of the transformers model."""
    rng, places = np.random.default_rng(0), np.arange(length)
    # The XLNet of transformers pools the last position of a row, even if it is padding.
    sizes = np.array([[length], [length if name == "xlnet" else max(1, length * 2 // 3)]])
    inside = (places < sizes).astype(np.int32)
    padding = 1 if "robert" in name or name in PADDED_BY_1 else 0
    ids = np.where(inside, rng.integers(5, 150, inside.shape), padding).astype(np.int32)
    config = MODELS[name][2]
    has_types = "token_type_ids" in families.family_of(config).huggingface.inputs and config.type_vocab_size > 1
    types = np.where(places >= sizes // 2, inside, 0) if has_types else 0 * ids
    arguments = dict(input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(inside))
    if types.any():
        arguments["token_type_ids"] = torch.tensor(types, dtype=torch.long)
    return (ids, inside, types), arguments


@pytest.mark.parametrize(
    "name, length, fields",
    [
        ("bert", 1, {}),
        ("bert", 40, dict(hidden_act="gelu_new")),
        ("bert", 64, dict(hidden_act="relu")),
        *((name, 64, {}) for name in MODELS if name not in ("bert", "modernbert", "eurobert", "xlnet")),
        ("mpnet", 300, {}),  # longer than the largest distance of the buckets, and attention in tiles
        ("electra", 9, dict(embedding_size=32)),
        ("albert", 9, dict(embedding_size=32, num_hidden_groups=1)),
        ("modernbert", 41, {}),
        ("eurobert", 9, {}),
        ("eurobert", 33, dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)),
        ("nomic-bert", 9, dict(hidden_act="gelu")),
        ("gte", 9, dict(type_vocab_size=0)),
        ("gte", 9, dict(type_vocab_size=2)),
        *(("gte", 64, dict(rope_theta=20_000.0, rope_scaling=scaling)) for scaling in SCALINGS),
        ("jina-embeddings-v3", 1, dict(hidden_act="relu")),
        *(("eurobert", 33, dict(rope_theta=20_000.0, rope_scaling=scaling)) for scaling in list(SCALINGS)[1:]),
        ("modernbert", 41, dict(zip(("global_rope_scaling", "local_rope_scaling"), SCALINGS))),
        ("ultrabert", 41, {}),
        ("ultrabert", 9, dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=16)),
        ("deberta-v2", 1, {}),
        ("deberta-v2", 9, dict(relative_attention=False, norm_rel_ebd="none", conv_kernel_size=5, conv_act="gelu")),
        ("deberta-v2", 41, OLD_DEBERTA),
    ],
)
def test_states_logits_attention_and_gradients_equal_transformers(name, length, fields, tmp_path):
    (batch, arguments), their_fields = batch_of(name, length), fields
    if "rope_scaling" in fields:
        scaling = SCALINGS[fields["rope_scaling"]]
        their_fields = dict(rope_parameters=scaling | dict(rope_theta=fields["rope_theta"]))
    if "global_rope_scaling" in fields:
        kinds = {
            kind: SCALINGS[fields[f"{part}_rope_scaling"]]
            | dict(rope_theta=getattr(MODELS[name][2], f"{part}_rope_theta"))
            for part, kind in (("global", "full_attention"), ("local", "sliding_attention"))
        }
        their_fields = dict(rope_parameters=kinds)
    their_model = save_theirs(tmp_path, name, "ForMaskedLM", **their_fields)
    source = pretrained.read_pretrained(tmp_path)
    assert source.config == dataclasses.replace(MODELS[name][2], **fields)
    assert source.predicts_words and not source.ignored
    assert count_parameters(source.params, source.config) == sum(x.numel() for x in their_model.parameters())
    real, places = batch[1][..., None], np.tile(np.arange(length), (2, 1))
    weights = (np.random.default_rng(1).normal(size=(2, length, 150)) * real / length).astype(np.float32)

    def predict(model):
        states = model.bert.encode(*batch, every_layer=True)
        return states, word_logits(model.bert, model.masked_lm, states[-1], places)[..., :150]

    def loss(params):
        states, logits = BertForMaskedLM(source.config).apply({"params": params}, method=predict)
        return (logits * weights).sum(), (states, logits)

    (_, (states, logits)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(source.params)
    expected = their_model(**arguments, output_hidden_states=True, output_attentions=True)
    for result, hidden in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(result * real, hidden.detach().numpy() * real, atol=1e-4)
    np.testing.assert_allclose(logits * real, expected.logits.detach().numpy() * real, atol=1e-4)
    (expected.logits * torch.tensor(weights)).sum().backward()
    family = families.family_of(source.config)
    named, _ = family.huggingface.to_tensors(gradients, source.config, type(their_model).__name__)
    expected_names = [key if key in named else TIED.get(key, key) for key, _ in their_model.named_parameters()]
    assert sorted(expected_names) == sorted(named)
    for key, param in zip(expected_names, their_model.parameters()):
        gradient = param.grad.numpy()
        np.testing.assert_allclose(named[key], gradient, atol=1e-4 * max(0.1, np.abs(gradient).max()), err_msg=key)
    if length > 1:
        attention = jax.jit(family.attention_probabilities, static_argnums=0)
        result = attention(source.config, source.params["bert"], *(x[:1] for x in batch))
        np.testing.assert_allclose(result, [x[0].detach() for x in expected.attentions], atol=1e-5)


LINEAR, YARN = dict(rope_type="linear", factor=4.0), dict(rope_type="yarn", factor=4.0, beta_fast=16.0)
LLAMA = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)


@pytest.mark.parametrize(
    "name, form", [("eurobert", 4), ("eurobert", 5), ("modernbert", 4), ("modernbert", 5), ("ultrabert", 5)]
)
@pytest.mark.parametrize("scaling", [LINEAR, LLAMA, YARN])
def test_scaled_rotary_positions_equal_transformers(name, form, scaling, tmp_path):
    """`form`: the version of transformers whose config.json has the fields."""
    folder, thetas = tmp_path / "theirs", {"full_attention": 1000.0, "sliding_attention": 100.0}
    save_theirs(folder, name, "Model", max_position_embeddings=48)
    fields = json.loads((folder / "config.json").read_text())
    del fields["rope_parameters"]
    if form == 5:
        by_kind = {kind: {**scaling, "rope_theta": theta} for kind, theta in thetas.items()}
        fields["rope_parameters"] = by_kind["full_attention"] if name == "eurobert" else by_kind
    elif name == "eurobert":
        fields |= dict(rope_theta=1000.0, rope_scaling=scaling)
    else:
        fields |= dict(global_rope_theta=1000.0, local_rope_theta=100.0, rope_scaling=scaling)
    (folder / "config.json").write_text(json.dumps(fields))
    their_model, (batch, arguments) = transformers.AutoModel.from_pretrained(folder), batch_of(name, 41)
    for source, target, form_of_target in (("theirs", "ours", "bertjax"), ("ours", "back", "huggingface")):
        conversion.convert(tmp_path / source, tmp_path / target, form_of_target)
    read, again = (pretrained.read_pretrained(tmp_path / place) for place in ("theirs", "back"))
    texts = {value for field, value in vars(read.config).items() if "rope_scaling" in field}
    assert read.config == again.config and {text.split()[0] for text in texts} == {scaling["rope_type"]}
    back = transformers.AutoModel.from_pretrained(tmp_path / "back")
    expected, expected_back = (model.eval()(**arguments).last_hidden_state.detach() for model in (their_model, back))
    encode = functools.partial(families.family_of(read.config).build(read.config, Compute()).apply, method="encode")
    states = jax.jit(encode)({"params": read.params["bert"]}, *batch)
    real = batch[1][..., None]
    np.testing.assert_allclose(states * real, expected.numpy() * real, atol=1e-4)
    np.testing.assert_allclose(expected_back.numpy() * real, expected.numpy() * real, atol=1e-6)
    plain = dataclasses.replace(read.config, **{field: "" for field in vars(read.config) if "rope_scaling" in field})
    encode = functools.partial(families.family_of(plain).build(plain, Compute()).apply, method="encode")
    assert np.abs(jax.jit(encode)({"params": read.params["bert"]}, *batch) * real - states * real).max() > 1e-2


@pytest.mark.parametrize("buckets, largest", [(256, 512), (32, 128), (7, 50), (512, 32768)])
def test_buckets_of_distances_equal_transformers(buckets, largest):
    """Distances beyond the largest one are clipped to its bucket."""
    apart = np.arange(-largest, largest + 1)
    theirs = transformers.models.deberta_v2.modeling_deberta_v2
    expected = theirs.make_log_bucket_position(torch.tensor(apart), buckets, largest).numpy()
    ours = buckets_of(apart, buckets, largest)
    np.testing.assert_array_equal(np.clip(ours, -buckets, buckets - 1), np.clip(expected, -buckets, buckets - 1))
    assert len({*ours}) < len(apart)


@pytest.mark.parametrize("name", ["mpnet", "nomic-bert", "gte", "jina-embeddings-v3", "ultrabert"])
def test_texts_in_a_packed_row_have_the_states_of_texts_alone(name, tmp_path):
    their_model, sizes = save_theirs(tmp_path, name, "ForMaskedLM"), np.array([7, 150, 1, 33])
    source, ids = pretrained.read_pretrained(tmp_path), np.random.default_rng(0).integers(5, 150, (1, 200))
    segments = np.repeat([1, 2, 3, 4, 0], [*sizes, 200 - sizes.sum()])[None]
    positions = np.concatenate([np.arange(size) for size in (*sizes, 200 - sizes.sum())])[None]
    encode = functools.partial(families.family_of(source.config).build(source.config, Compute()).apply, method="encode")
    states = jax.jit(encode)({"params": source.params["bert"]}, ids, segments, 0 * ids, positions)[0]
    for text, end in enumerate(np.cumsum(sizes)):
        place = slice(end - sizes[text], end)
        expected = their_model(torch.tensor(ids[:, place]), output_hidden_states=True).hidden_states[-1]
        np.testing.assert_allclose(states[place], expected[0].detach(), atol=1e-4)


def classes():
    """Yields model names, suffixes of the class names, and fields of a config."""
    four = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
    for name, heads in {
        "bert": ("Model", "ForMaskedLM", "ForNextSentencePrediction", "ForPreTraining", *four),
        "roberta": ("ForMaskedLM", *four),
        "xlm-roberta": ("ForSequenceClassification",),
        "xlm-roberta-xl": ("Model", "ForMaskedLM", *four),
        "camembert": ("ForTokenClassification",),
        "distilbert": ("ForMaskedLM", *four),
        "electra": ("ForMaskedLM", "ForPreTraining", *four),
        "mpnet": ("Model", "ForMaskedLM", *four),
        "albert": ("Model", "ForMaskedLM", "ForPreTraining", *four),
        "modernbert": ("Model", "ForMaskedLM", *four),
        "eurobert": ("Model", "ForMaskedLM", *four[:2]),
        "ultrabert": ("Model", "ForMaskedLM", *four[:3]),
        "deberta-v2": ("Model", "ForMaskedLM", *four),
        "nomic-bert": ("Model", "ForMaskedLM", *four[:2]),
        "gte": ("Model", "ForMaskedLM", *four[:2]),
        "jina-embeddings-v3": ("Model", "ForMaskedLM", *four[:3]),
        "megatron-bert": ("Model", "ForMaskedLM", "ForNextSentencePrediction", "ForPreTraining", *four),
        "xlnet": ("Model", *BERTS, four[0], four[1], four[3]),
    }.items():
        yield from ((name, head, {}) for head in heads)
    yield from (("modernbert", head, dict(classifier_pooling="mean")) for head in (four[0], four[3]))
    yield from (("deberta-v2", head, OLD_DEBERTA) for head in ("Model", "ForMaskedLM"))
    yield from (("gte", head, dict(type_vocab_size=0)) for head in ("Model", four[0]))
    yield from (
        ("ultrabert", head, dict(classifier_pooling="mean", tie_word_embeddings=True))
        for head in (four[0], "ForMaskedLM")
    )
    yield from (("eurobert", four[0], dict(classifier_pooling=pooling)) for pooling in ("bos", "mean"))


@pytest.mark.parametrize("name, head, fields", classes())
def test_every_class_gives_equal_outputs_and_round_trips_bit_for_bit(name, head, fields, tmp_path):
    our_class, has_labels = BERTS.get(head, head), head.endswith("Classification")
    labels = dict(id2label=dict(enumerate("abc")), label2id=dict(zip("abc", range(3)))) if has_labels else {}
    labels = labels or dict(num_labels=1 if head == "ForMultipleChoice" else 2)
    their_model = save_theirs(tmp_path / "theirs", name, head, **labels, **fields)
    for source, target, form in (("theirs", "ours", "bertjax"), ("ours", "back", "huggingface")):
        assert "left out" not in conversion.convert(tmp_path / source, tmp_path / target, form)
    read = pretrained.read_pretrained(tmp_path / "back")
    assert (
        read.architecture == f"Bert{our_class}"
        and not read.ignored
        and (read.labels == ("a", "b", "c") or not has_labels)
    )
    assert read.predicts_words == (our_class == "ForMaskedLM" or (head == "ForPreTraining" and name != "electra"))
    back, info = type(their_model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    before, after = their_model.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    before, after = their_model.config.to_dict(), back.config.to_dict()
    changed = {key for key in before if before[key] != after.get(key)}
    assert not {key for key in changed if not key.endswith("_token_id")} - {"_name_or_path"}
    if our_class not in HEADS or (name, head) == ("electra", "ForPreTraining"):
        return

    batch, arguments = batch_of(name, 32)
    more = [np.tile(np.arange(32), (2, 1))] if head == "ForPreTraining" else []
    outputs = jax.jit(HEADS[our_class](read.config).apply)({"params": read.params}, *batch, *more)
    with torch.no_grad():
        expected = their_model(
            **{key: x[:, None] if head == "ForMultipleChoice" else x for key, x in arguments.items()}
        )
    if head == "ForPreTraining":
        outputs, pairs = outputs
        expected_pairs = expected.sop_logits if name == "albert" else expected.seq_relationship_logits
        np.testing.assert_allclose(pairs, expected_pairs, atol=1e-4)
        expected, outputs = expected.prediction_logits, outputs[..., :150]
    elif our_class == "ForQuestionAnswering":
        expected = torch.stack([expected.start_logits, expected.end_logits], -1)
    else:
        expected = expected.logits
    real = batch[1][..., None] if outputs.ndim == 3 else 1
    np.testing.assert_allclose(outputs * real, expected.numpy() * real, atol=1e-4)


@pytest.mark.parametrize("name", ["nomic-bert", "gte", "jina-embeddings-v3"])
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_tensor_names_of_published_code_and_of_transformers_give_equal_params(name, head, tmp_path):
    """`save_pretrained` of transformers writes the names of the published code by default."""
    model = save_theirs(tmp_path / "published", name, head)
    model.save_pretrained(tmp_path / "current", save_original_format=False)
    sources = [pretrained.read_pretrained(tmp_path / folder) for folder in ("published", "current")]
    files = [dict(huggingface.tensors_of(epath.Path(source.path))).keys() for source in sources]
    assert files[0] != files[1] and not any(source.ignored for source in sources)
    jax.tree.map(np.testing.assert_array_equal, *(source.params for source in sources))


@pytest.mark.parametrize("name, decoder", [("bert", "BertLMHeadModel"), ("megatron-bert", "MegatronBertForCausalLM")])
def test_a_causal_bert_equals_the_decoder_of_transformers(name, decoder, tmp_path):
    save_theirs(tmp_path, name, "ForMaskedLM")
    their_class = getattr(transformers, decoder)
    their_model = their_class.from_pretrained(tmp_path, is_decoder=True, attn_implementation="eager")
    source, ((ids, inside, types), arguments) = pretrained.read_pretrained(tmp_path), batch_of(name, 32)
    model = BertForMaskedLM(dataclasses.replace(source.config, causal=True))
    places = np.tile(np.arange(32), (2, 1))
    logits = jax.jit(model.apply)({"params": source.params}, ids, inside, types, places)[..., :150]
    expected = their_model.eval()(**arguments).logits.detach().numpy()
    np.testing.assert_allclose(logits * inside[..., None], expected * inside[..., None], atol=1e-4)


def test_a_discriminator_has_no_lm_head(tmp_path):
    save_theirs(tmp_path / "theirs", "electra", "ForPreTraining")
    printed = conversion.convert(tmp_path / "theirs", tmp_path / "encoder", "huggingface", "ElectraModel")
    assert "left out, because ElectraModel cannot store them: replaced_tokens" in printed
    with pytest.raises(UserError, match="ElectraForMaskedLM: the checkpoint must contain cls/predictions; use "):
        conversion.convert(tmp_path / "theirs", tmp_path / "words", "huggingface", "ElectraForMaskedLM")


# The two streams of XLNet.

TYPES = np.repeat([[0] * 5 + [1] * 6 + [2]], 2, axis=0).astype(np.int32)  # A, B, [CLS]
LENGTH, WORDS = 12, 150


@pytest.fixture(scope="module")
def xlnets(tmp_path_factory):
    """(transformers model, our checkpoint, ids `[2, length]`, predicted positions, one-hot rows of positions)."""
    folder = tmp_path_factory.mktemp("xlnet")
    their_model, source = save_theirs(folder, "xlnet", "LMHeadModel"), pretrained.read_pretrained(folder)
    assert source.config == MODELS["xlnet"][2] and source.predicts_words and not source.ignored
    rng = np.random.default_rng(0)
    places = np.stack([1 + rng.permutation(LENGTH - 1)[:3] for _ in range(2)])
    mapping = (places[:, :, None] == np.arange(LENGTH)).astype(np.float32)
    return their_model, source, rng.integers(0, WORDS, (2, LENGTH)), places, mapping


@pytest.mark.parametrize("kept", [0, 7])
def test_both_streams_of_xlnet_equal_transformers(kept, xlnets):
    their_model, source, ids, places, mapping = xlnets
    rng = np.random.default_rng(1)
    seen = rng.random((2, LENGTH, LENGTH)) < 0.5
    seen[:, :, 0] = True  # a row that attends to no position would give NaN
    # a prediction does not see its own token
    hidden = ~seen | (mapping.any(1)[:, :, None] & np.eye(LENGTH, dtype=bool))
    memory = rng.normal(size=(2, 2, kept, 32)).astype(np.float32) if kept else None
    remembered = RecurrentMemory(jnp.moveaxis(memory, 0, 1), jnp.full([2], kept)) if kept else None
    mems = [torch.tensor(layer_memory).transpose(0, 1) for layer_memory in memory] if kept else None
    inputs = dict(input_ids=ids, perm_mask=hidden.astype(np.float32), target_mapping=mapping, token_type_ids=TYPES)
    inputs = {name: torch.tensor(x) for name, x in inputs.items()}
    expected = their_model(**inputs, mems=mems, use_mems=True, output_hidden_states=True)
    weights = rng.normal(size=(2, 3, WORDS)).astype(np.float32)

    def predict(lm):
        inside = np.ones_like(ids)
        streams = lm.bert.encode_permuted(
            ids, inside, TYPES, seen=seen, places=places, memory=remembered, every_layer=True
        )
        numbers = jnp.broadcast_to(jnp.arange(3), places.shape)
        return word_logits(lm.bert, lm.masked_lm, streams[1][-1], numbers)[..., :WORDS], streams

    def loss(params):
        logits, streams = BertForMaskedLM(source.config).apply({"params": params}, method=predict)
        return (logits * weights).mean(), (logits, streams)

    (_, (logits, streams)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(source.params)
    for stream, states in enumerate(streams[:2]):
        for our_states, hidden in zip(states, expected.hidden_states[stream::2], strict=True):
            np.testing.assert_allclose(our_states, hidden.detach(), atol=1e-4)
    # transformers returns the earlier memory, too
    for our_states, theirs_kept in zip(streams[0][:-1], expected.mems, strict=True):
        np.testing.assert_allclose(our_states, theirs_kept[kept:].transpose(0, 1), atol=1e-4)
    np.testing.assert_allclose(logits, expected.logits.detach(), atol=1e-4)
    their_model.zero_grad()
    (expected.logits * torch.tensor(weights)).mean().backward()
    named, _ = XLNET.huggingface.to_tensors(gradients, source.config, "XLNetLMHeadModel")
    for name, param in their_model.named_parameters():
        gradient = param.grad.numpy()
        assert np.abs(named[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 1e-2), name


def test_plain_xlnet_states_attention_and_predictions_equal_transformers(xlnets):
    their_model, source, ids, places, mapping = xlnets
    inside, places = np.ones((2, LENGTH), np.int32), places.copy()
    inside[1, 9:] = 0
    inputs = dict(input_ids=ids, token_type_ids=TYPES, attention_mask=inside)
    inputs = {name: torch.tensor(x) for name, x in inputs.items()}
    expected = their_model(**inputs, output_hidden_states=True, output_attentions=True)
    encode = functools.partial(XlnetModel(source.config).apply, every_layer=True, method="encode")
    states = jax.jit(encode)({"params": source.params["bert"]}, ids, inside, TYPES)
    for our_states, hidden in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(
            our_states * inside[..., None], hidden.detach().numpy() * inside[..., None], atol=1e-4
        )
    attention = jax.jit(XLNET.attention_probabilities, static_argnums=0)
    probabilities = attention(source.config, source.params["bert"], ids[:1], inside[:1], TYPES[:1])
    np.testing.assert_allclose(probabilities, [x[0].detach() for x in expected.attentions], atol=1e-4)

    places[1] = [3, 5, 5]  # the last prediction fills up the row
    mapping = (places[:, :, None] == np.arange(LENGTH)).astype(np.float32)
    hidden = np.repeat(mapping.any(1)[:, None], LENGTH, axis=1).astype(np.float32)  # any token may attend
    expected = their_model(**inputs, perm_mask=torch.tensor(hidden), target_mapping=torch.tensor(mapping)).logits
    predict = jax.jit(BertForMaskedLM(source.config).apply)
    logits = predict({"params": source.params}, ids, inside, TYPES, places)[..., :WORDS]
    np.testing.assert_allclose(logits[0], expected[0].detach(), atol=1e-4)
    np.testing.assert_allclose(logits[1, :1], expected[1, :1].detach(), atol=1e-4)

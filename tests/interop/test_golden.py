"""The model and the readers compared with tests/golden/bert of transformers, see tests/golden/make_bert.py."""

import dataclasses
import json
import pathlib
import re
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.config.model_config import Compute
from bertjax.data.records import layouts
from bertjax.finetuning.tasks import classify, ner
from bertjax.inference import fill_mask
from bertjax.interop import conversion, huggingface, initialization, pretrained, tf1
from bertjax.models.bert.huggingface import FORMAT, huggingface_name, is_transposed
from bertjax.models.bert.tf1_names import to_variables
from bertjax.models.heads import BertForMaskedLM, BertForPreTraining, word_logits
from bertjax.text.tokenizer import WordPiece
from tests.conftest import one_device_mesh, pretraining_task
from tests.markers import slow_case
from tests.text.test_tokenizer import modernbert_json

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "bert"
EXPECTED = np.load(GOLDEN / "expected.npz")


@pytest.fixture(scope="module")
def golden():
    return pretrained.read_pretrained(GOLDEN)


@pytest.fixture
def folder(tmp_path):
    """A copy that a test may damage."""
    return pathlib.Path(shutil.copytree(GOLDEN, tmp_path / "bert"))


def edit(path, **changes):
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def only(params, *parts):
    return {"bert": {name: x for name, x in params["bert"].items() if name != "pooler" or "pooler" in parts}} | {
        name: params[name] for name in parts if name in params
    }


def same(a: dict, b: dict) -> bool:
    """Returns whether arrays with equal names have equal bytes."""
    a, b = pretrained.flattened(a), pretrained.flattened(b)
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_forward_pass_equals_transformers(golden):
    batch = [EXPECTED[name] for name in ("input_ids", "input_mask", "segment_ids")]
    real = EXPECTED["input_mask"][..., None]

    def outputs(model):
        layers = model.bert.encode(*batch, every_layer=True)
        words = word_logits(model.bert, model.masked_lm, layers[-1], EXPECTED["masked_lm_positions"])
        pairs = model.next_sentence(model.bert.pool(layers[-1], None, None))
        return layers * real, words[..., : golden.config.vocab_size], pairs

    def run(*types):
        model = BertForPreTraining(golden.config, Compute(*types))
        return jax.jit(lambda params: model.apply({"params": params}, method=outputs))(golden.params)

    layers, words, pairs = run()
    np.testing.assert_allclose(layers, EXPECTED["hidden_states"] * real, atol=1e-5)
    np.testing.assert_allclose(words, EXPECTED["masked_lm_logits"], atol=1e-5)
    np.testing.assert_allclose(pairs, EXPECTED["next_sentence_logits"], atol=1e-5)
    _, rough, _ = run("bfloat16", "bfloat16")
    assert 0 < np.linalg.norm(rough - words) / np.linalg.norm(words) < 3e-2


def test_loss_and_gradients_equal_transformers(golden):
    settings = pretraining_config()
    settings.model.update(dataclasses.asdict(golden.config))
    settings.stages, settings.batch_size = named_stages(short=stage(1, 16, 3)), 3
    task = pretraining_task(settings, one_device_mesh(settings), None)
    batch = {name: EXPECTED[feature] for feature, name in layouts.ARRAY_OF_FEATURE.items()}
    batch["sequence_weights"] = np.ones(3, np.float32)
    step = jax.jit(jax.value_and_grad(lambda params: task.loss(params, task.loss.normalize(batch))[0]))
    loss, gradients = step(golden.params)
    np.testing.assert_allclose(loss, EXPECTED["loss"], rtol=1e-5)
    for name, gradient in to_variables(gradients, golden.config).items():
        expected = EXPECTED[f"gradient {huggingface_name(name)}"]
        expected = expected.T if is_transposed(name) else expected
        assert np.abs(gradient - expected).max() <= 1e-4 * np.abs(expected).max() + 1e-7, name


@pytest.mark.parametrize("to", [slow_case(to) if to == "tf1" else to for to in pretrained.FORMATS])
def test_round_trips_are_bit_exact(golden, tmp_path, to):
    printed = conversion.convert(GOLDEN, tmp_path / to, to)
    again = pretrained.read_pretrained(tmp_path / to)
    assert printed.startswith(f"huggingface -> {to}: ") and again.format == to
    assert same(again.params, golden.params) and again.config == golden.config
    assert again.tokenizer.fingerprint == golden.tokenizer.fingerprint
    conversion.convert(tmp_path / to, tmp_path / "back", "huggingface")
    assert same(*(safetensors.numpy.load_file(f / huggingface.WEIGHTS) for f in (GOLDEN, tmp_path / "back")))


@pytest.mark.parametrize("to", pretrained.FORMATS)
def test_a_model_without_pooler_round_trips_as_masked_lm(golden, tmp_path, to):
    params = only(golden.params, "masked_lm")
    huggingface.write(tmp_path / "first", golden.config, params, golden.tokenizer)
    for source, target, into in (("first", "second", to), ("second", "third", "huggingface")):
        assert "left out" not in conversion.convert(tmp_path / source, tmp_path / target, into)
        assert same(pretrained.read_pretrained(tmp_path / target).params, params)
    assert huggingface.read_head(tmp_path / "third" / huggingface.CONFIG)[0] == "BertForMaskedLM"
    message = (
        "--architecture=BertForPreTraining: the checkpoint must contain bert/pooler; use --architecture=BertForMaskedLM"
    )
    with pytest.raises(UserError, match=message):
        conversion.convert(tmp_path / "second", tmp_path / "other", "huggingface", "BertForPreTraining")


ALL = ("pooler", "masked_lm", "next_sentence")
VARIANTS = {  # renamed tensors, missing tensors, and the remaining parts
    "no prefix": ({r"^bert\.": ""}, None, ALL),
    "PyTorch's wrapper": ({"^": "module."}, None, ALL),
    "two wrappers": ({"^": "_orig_mod.module."}, None, ALL),
    "gamma and beta": ({"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}, None, ALL),
    "stored decoder": ({}, None, ALL),
    "no pooler": ({}, "pooler", ALL[1:]),
    "no NSP head": ({}, "seq_relationship", ALL[:2]),
    "bare encoder": ({r"^bert\.": ""}, "^cls", ALL[:1]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_published_name_variants_are_read(golden, folder, name):
    renames, dropped, parts = VARIANTS[name]
    tensors = safetensors.numpy.load_file(folder / huggingface.WEIGHTS)
    if name == "stored decoder":
        words, bias = tensors["bert.embeddings.word_embeddings.weight"], tensors["cls.predictions.bias"]
        tensors |= {"cls.predictions.decoder.weight": words, "cls.predictions.decoder.bias": bias}
        tensors["bert.embeddings.position_ids"] = np.arange(24)[None]
    tensors = {key: x for key, x in tensors.items() if not (dropped and re.search(dropped, key))}
    for old, new in renames.items():
        tensors = {re.sub(old, new, key): x for key, x in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / huggingface.WEIGHTS)
    read = pretrained.read_pretrained(folder)
    assert same(read.params, only(golden.params, *parts)) and read.ignored == []


def test_several_shards_are_one_checkpoint(golden, folder):
    tensors = safetensors.numpy.load_file(folder / huggingface.WEIGHTS)
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        safetensors.numpy.save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
    (folder / f"{huggingface.WEIGHTS}.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / huggingface.WEIGHTS).unlink()
    assert same(pretrained.read_pretrained(folder).params, golden.params)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00001-of-00002.safetensors: missing, but listed in"):
        pretrained.read_pretrained(folder)


def test_tf1_export_has_googles_names_and_shapes(golden, tmp_path):
    from bertjax.data.tensorflow import tf

    tf1.write(tmp_path, golden.config, golden.params, golden.tokenizer)
    shapes = tf.train.load_checkpoint(str(tmp_path / "bert_model.ckpt")).get_variable_to_shape_map()
    hidden, inner = golden.config.hidden_size, golden.config.intermediate_size
    for name, shape in {
        "bert/embeddings/word_embeddings": [golden.config.vocab_size, hidden],
        "bert/encoder/layer_1/attention/self/query/kernel": [hidden, hidden],
        "bert/encoder/layer_0/intermediate/dense/kernel": [hidden, inner],
        "bert/encoder/layer_0/output/LayerNorm/gamma": [hidden],
        "cls/predictions/transform/dense/kernel": [hidden, hidden],
        "cls/predictions/output_bias": [golden.config.vocab_size],
        "cls/seq_relationship/output_weights": [2, hidden],
    }.items():
        assert shapes[name] == shape
    settings = json.loads((tmp_path / "bert_config.json").read_text())
    assert settings["hidden_act"] == "gelu" and settings["type_vocab_size"] == 2


def test_googles_checkpoints_are_read_without_optimizer_and_with_tanh_gelu(golden, tmp_path):
    from bertjax.data.tensorflow import tf

    variables = to_variables(golden.params, golden.config)
    slots = {f"{name}/{slot}": x for name, x in variables.items() for slot in ("adam_m", "adam_v")}
    extra = {"global_step": np.array(1000), **slots}
    everything = variables | extra
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "model.ckpt-1000"), tensor_names=list(everything),
        shape_and_slices=[""] * len(everything), tensors=list(everything.values()),
    )  # fmt: skip
    fields = dataclasses.asdict(golden.config) | {"hidden_act": "gelu"}
    del fields["layer_norm_eps"]
    (tmp_path / "bert_config.json").write_text(json.dumps(fields))
    (tmp_path / "vocab.txt").write_text((GOLDEN / "vocab.txt").read_text().replace("ship", "Ship"))
    for name in ("model.ckpt-1000", "model.ckpt-1000.index"):
        read = pretrained.read_pretrained(tmp_path / name)
        assert read.config.hidden_act == "gelu_new" and read.config.layer_norm_eps == 1e-12
        assert read.ignored == [] and not read.tokenizer.lowercase
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), read.params, golden.params))


CONFIG, VOCABULARY = "config.json", "vocab.txt"
DAMAGES = {  # a file; its new content, fields or name, or None without the file; the message
    "cut off": (huggingface.WEIGHTS, (GOLDEN / huggingface.WEIGHTS).read_bytes()[:50_000], "damaged or truncated"),
    "no weights": (huggingface.WEIGHTS, None, "no model.safetensors and no pytorch_model.bin, whole"),
    "TensorFlow 2": (huggingface.WEIGHTS, "tf_model.h5", "tf_model.h5: weights of TensorFlow 2 are not supported"),
    "no field": (CONFIG, dict(hidden_size=None), "config.json: hidden_size is missing"),
    "no number": (CONFIG, dict(hidden_size="many"), "hidden_size is 'many'; expected int"),
    "not JSON": (CONFIG, b"{", "config.json: damaged"),
    "deberta": (CONFIG, dict(model_type="deberta"), "model_type 'deberta'.*supported: albert, bert, gpt2"),
    "distilbert": (CONFIG, dict(model_type="distilbert"), "config.json: hidden_dim is missing"),
    "relative": (CONFIG, dict(position_embedding_type="relative_key"), "supported: 'absolute'"),
    "activation": (CONFIG, dict(hidden_act="swish"), "hidden_act 'swish' is not supported"),
    "wrong size": (CONFIG, dict(intermediate_size=64),
                   r"layer_0/intermediate/dense/kernel has shape \(32, 48\); expected \(32, 64\)"),
    "missing layer": (CONFIG, dict(num_hidden_layers=3), "layer_2/.* is missing"),
    "long vocabulary": (VOCABULARY, (GOLDEN / VOCABULARY).read_bytes() + b"more\n",
                        "tokenizer has 28 tokens, but the model has 27"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_are_refused(name, folder):
    file, content, message = DAMAGES[name]
    path = folder / file
    if isinstance(content, dict):
        edit(path, **content)
    elif isinstance(content, str):
        path.rename(folder / content)
    else:
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        pretrained.read_pretrained(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "parts, stated, chosen, left_out",
    [
        (("pooler", "masked_lm", "next_sentence"), "BertForMaskedLM", "BertForPreTraining", ()),  # bert-base-uncased
        (("pooler", "masked_lm", "next_sentence"), "", "BertForPreTraining", ()),
        (("pooler", "masked_lm"), "", "BertModel BertForMaskedLM", None),
        (("masked_lm",), "", "BertForMaskedLM", ()),
        (("pooler",), "", "BertModel", ()),
        ((), "", "BertModel", ()),
        (("pooler", "spans"), "", "BertForQuestionAnswering", ("bert/pooler/dense/bias", "bert/pooler/dense/kernel")),
        (("pooler", "classifier"), "", "BertForSequenceClassification", ()),
        (("classifier",), "", "BertForTokenClassification", ()),
        (("pooler", "classifier"), "BertForMultipleChoice", "BertForMultipleChoice", ()),
    ],
)
def test_the_exported_class_keeps_most_params(golden, tmp_path, parts, stated, chosen, left_out):
    """Google's run_squad keeps the pooler; bert-base-uncased declares BertForMaskedLM, but has more params."""
    rows = 1 if stated == "BertForMultipleChoice" else 2
    head = {"dense": {"kernel": np.ones((32, rows), np.float32), "bias": np.zeros(rows, np.float32)}}
    params = only(golden.params | {"classifier": head, "spans": head}, *parts)
    architecture = FORMAT.choose_architecture(params, golden.config, stated)
    assert architecture in chosen.split()
    dropped = huggingface.write(tmp_path, golden.config, params, None, architecture)
    assert left_out is None or sorted(dropped) == list(left_out)
    again = to_variables(pretrained.read_pretrained(tmp_path).params, golden.config)
    assert again.keys() == to_variables(params, golden.config).keys() - set(dropped)


def test_config_fields_are_supported_or_refused(folder, capfd):
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 16, "stride": 2, "shipping": 1}))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"directionality": "bidi", "whales": 5}))
    assert pretrained.read_pretrained(folder).max_seq_length == 16
    notes = capfd.readouterr().err
    assert notes.count("config.json: ignored fields, which transformers does not read either: whales\n") == 1
    assert (
        notes.count("tokenizer_config.json: ignored fields, which transformers does not read either: shipping\n") == 1
    )
    head = {"architectures": ["BertForTokenClassification"], "id2label": {"1": "O", "2": "B"}}
    (folder / "config.json").write_text(json.dumps(fields | head))
    with pytest.raises(UserError, match="id2label has 2 labels, but none for 0; number the labels from 0 to 1"):
        huggingface.read_head(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(fields | {"id2label": {"1": "O"}}))  # no classifier
    assert huggingface.read_head(folder / "config.json")[1] == ()


def test_an_untied_lm_head_is_named(folder, capfd):
    tensors = safetensors.numpy.load_file(folder / huggingface.WEIGHTS)
    words, bias = tensors["bert.embeddings.word_embeddings.weight"], tensors["cls.predictions.bias"]
    tensors |= {"cls.predictions.decoder.weight": words + 1, "cls.predictions.decoder.bias": bias + 1}
    safetensors.numpy.save_file(tensors, folder / huggingface.WEIGHTS)
    with pytest.raises(UserError, match=r"decoder.bias differs from cls.predictions.bias; expected equal"):
        pretrained.read_pretrained(folder)
    edit(folder / "config.json", tie_word_embeddings=False)
    source = pretrained.read_with_tokenizer(folder)
    assert "cls.predictions.decoder.weight is not tied to the word embeddings" in source.no_words_reason
    assert "ignored weights: cls.predictions.bias, cls.predictions.decoder.weight," in capfd.readouterr().err


WITH_PREFIX = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def test_settings_of_a_byte_level_tokenizer_must_agree_with_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "modernbert"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(modernbert_json()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": False}))
    assert pretrained.read_tokenizer(tmp_path).kind == "bpe"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))  # the class has no prefix by default
    (tmp_path / "tokenizer.json").write_text(json.dumps(modernbert_json() | {"pre_tokenizer": WITH_PREFIX}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"add_prefix_space is False by default, but .* True"):
        pretrained.read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(modernbert_json()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": True}))
    with pytest.raises(UserError, match=r"add_prefix_space is True, but .*tokenizer.json has False; use equal values"):
        pretrained.read_tokenizer(tmp_path)


def test_folders_without_a_checkpoint_are_named(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        pretrained.read_pretrained(tmp_path)
    (tmp_path / "run/records").mkdir(parents=True)
    with pytest.raises(UserError, match=r"run: the run has no checkpoint yet; .*start the command of the run again$"):
        pretrained.read_pretrained(tmp_path / "run")
    (tmp_path / "bert_model.ckpt.index").write_bytes(b"nonsense")
    (tmp_path / "bert_config.json").write_text((GOLDEN / "config.json").read_text())
    with pytest.raises(UserError, match=r"bert_model.ckpt: damaged or incomplete"):
        pretrained.read_pretrained(tmp_path)


def test_a_pickle_needs_a_torch_version_with_safe_loading(folder, monkeypatch):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pytorch_model.bin: needs PyTorch: pip install torch, or load it"):
        pretrained.read_pretrained(folder)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.5.1+cpu"))
    with pytest.raises(
        UserError, match=r"torch 2.5.1\+cpu can run code .*, expected 2.6 or newer: pip install 'torch>=2.6'"
    ):
        pretrained.read_pretrained(folder)


SETTINGS, JSON = "tokenizer_config.json", "tokenizer.json"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
WHOLE = "all of tokenizer.json"
FOREIGN = {  # files of a tokenizer, and the reason why the tokenizer is refused
    "class in config.json": ({"config.json": {"tokenizer_class": "BertJapaneseTokenizer"}}, "BertJapaneseTok.* is not"),
    "truncation": ({SETTINGS: {"truncation_side": "left"}}, "truncation_side 'left' is not supported"),
    "code": ({SETTINGS: {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}}, "auto_map .* is not supported"),
    "another special piece": ({SETTINGS: {"ship_token": "ship"}}, r"adds tokens \(ship\)"),
    "start": ({"special_tokens_map.json": {"bos_token": {"content": "ship"}}}, r"adds tokens \(ship\)"),
    "bos": ({SETTINGS: {"add_bos_token": True}}, "add_bos_token and add_eos_token true are not supported without"),
    "class": ({SETTINGS: {"tokenizer_class": "BertJapaneseTokenizer"}}, "'BertJapaneseTokenizer' is not"),
    "Chinese": ({SETTINGS: {"tokenize_chinese_chars": False}}, "tokenize_chinese_chars False is not supported"),
    "basic": ({SETTINGS: {"do_basic_tokenize": False}}, "do_basic_tokenize False is not supported"),
    "never split": ({SETTINGS: {"never_split": ["ship"]}}, r"never_split = \['ship'\] is not supported"),
    "accents": ({SETTINGS: {"do_lower_case": True, "strip_accents": False}}, "strip_accents False with"),
    "case": ({SETTINGS: {"do_lower_case": False}, JSON: {}}, "is False, but .*json"),
    "special name": ({SETTINGS: {"cls_token": "<s>"}}, "cls_token '<s>' is not supported; supported: '.CLS.'"),
    "special name in a map": ({"special_tokens_map.json": {"sep_token": {"content": "</s>"}}}, "sep_token '</s>' is"),
    "markers": ({SETTINGS: {"additional_special_tokens": ["ship"]}}, r"adds tokens \(ship\), which"),
    "new markers": ({SETTINGS: {"extra_special_tokens": {"ship_token": "ship"}}}, r"adds tokens \(ship\)"),
    "decoder": ({SETTINGS: {"added_tokens_decoder": {"7": {"content": "ship"}}}}, r"adds tokens \(ship\)"),
    "moved": ({SETTINGS: {"added_tokens_decoder": {"1": {"content": "[PAD]"}}}}, "'.PAD.' as 1"),
    "added": ({"added_tokens.json": {"ship": 9}}, r"added_tokens.json adds tokens \(ship\)"),
    "added in JSON": ({JSON: {"added_tokens": [{"content": "ship"}]}}, r"json adds tokens \(ship\)"),
    "normalizer": ({JSON: {"normalizer": {"type": "Sequence"}}}, "normalizer Sequence is not supported"),
    "no normalizer": ({JSON: {"normalizer": None}}, "normalizer null is not supported"),
    "words": ({JSON: {"pre_tokenizer": {"type": "Whitespace"}}}, "pre_tokenizer Whitespace is not"),
    "template": ({JSON: {"post_processor": {"type": "RobertaProcessing"}}}, "post_processor Rober"),
    "prefix": ({JSON: {"model": {"continuing_subword_prefix": "@@"}}}, "continuing_subword_prefix = '@@'"),
    "unknown": ({JSON: {"model": {"unk_token": "<unk>"}}}, "model.unk_token = '<unk>' is not supported"),
    "another vocabulary": ({JSON: {"model": {"vocab": {}}}}, "have different tokens from id 5 on"),
    "no WordPiece": ({WHOLE: {"model": {"type": "WordLevel"}, "normalizer": None}}, "is not a BERT WordPiece tok"),
    "BPE, suffix": ({WHOLE: {"model": {"type": "BPE", "vocab": {}, "end_of_word_suffix": "</w>"}, "normalizer": None,
                     "pre_tokenizer": {"type": "ByteLevel"}}}, "end_of_word_suffix = '</w>' is not supported"),
    "gaps": ({WHOLE: {"model": {"vocab": {"a": 0, "b": 9}}}}, "2 tokens have ids from 0 to 9"),
    "one id": ({WHOLE: {"model": {"vocab": {"a": 0, "b": 0}}}}, "'a' and 'b' have the same id, 0"),
    "added alone": ({WHOLE: {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<user>"}]}},
                    r"adds tokens \(<user>\)"),
    "accents alone": ({WHOLE: {"model": {"vocab": {"a": 0}}, "normalizer": {"type": "BertNormalizer", "lowercase": True,
                 "strip_accents": False}}}, "lowercase True and strip_accents False"),
    "other JSON": ({WHOLE: {"a": 1}}, "is not a tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_unsupported_tokenizer_settings_are_refused(golden, folder, name):
    written, message = FOREIGN[name]
    tokenizer_json = json.loads(golden.tokenizer.to_huggingface())
    if name == "another vocabulary":
        tokenizer_json["model"]["vocab"] = {piece: i for i, piece in enumerate(golden.tokenizer.pieces[:5])}
        written = {JSON: {}}
    for file, content in written.items():
        if file == WHOLE:
            parts = {"normalizer": {"type": "BertNormalizer"}, "pre_tokenizer": {"type": "BertPreTokenizer"}}
            (folder / JSON).write_text(json.dumps(parts | content))
        elif file == JSON:
            model = {"model": tokenizer_json["model"] | content.get("model", {})}
            (folder / JSON).write_text(json.dumps(tokenizer_json | content | model))
        else:
            known = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
            (folder / file).write_text(json.dumps(known | content))
    with pytest.raises(UserError, match=message) as error:
        pretrained.read_tokenizer(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", None])
def test_equivalent_tokenizer_settings_are_accepted(golden, folder, name):
    special = {
        f"{n}_token": golden.tokenizer.pieces[getattr(golden.tokenizer, f"{n}_id")] for n in ("pad", "cls", "sep")
    }
    decoder = {"added_tokens_decoder": {"0": {"content": golden.tokenizer.pieces[0], "special": True}}}
    settings = {"tokenizer_class": name, "do_lower_case": True, "strip_accents": None, "model_max_length": 64}
    (folder / SETTINGS).write_text(json.dumps({**settings, **special, **decoder, "additional_special_tokens": []}))
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer.json").write_text(golden.tokenizer.to_huggingface())
    assert pretrained.read_tokenizer(folder).fingerprint == golden.tokenizer.fingerprint


def test_a_cased_vocabulary_needs_an_explicit_setting(golden, folder):
    """transformers lower-cases text by default."""
    (folder / SETTINGS).unlink()
    assert pretrained.read_tokenizer(folder).lowercase
    (folder / "vocab.txt").write_text("\n".join(golden.tokenizer.pieces).replace("ship", "Ship") + "\n")
    with pytest.raises(UserError, match=r"do_lower_case is missing, and its default is true, but vocab.txt has 'Ship"):
        pretrained.read_tokenizer(folder)
    (folder / SETTINGS).write_text('{"do_lower_case": false}')
    cased = pretrained.read_tokenizer(folder)
    assert not cased.lowercase
    (folder / "tokenizer.json").write_text(cased.to_huggingface())
    assert pretrained.read_tokenizer(folder).fingerprint == cased.fingerprint
    (folder / SETTINGS).unlink()
    with pytest.raises(UserError, match=r"do_lower_case is True by default, but .*json has False"):
        pretrained.read_tokenizer(folder)


def test_a_variable_of_tensorflow_2_is_named(golden, tmp_path):
    from bertjax.data.tensorflow import tf

    name = "encoder/.ATTRIBUTES/VARIABLE_VALUE"
    prefix = str(tmp_path / "bert_model.ckpt")
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=[name], shape_and_slices=[""], tensors=[np.ones(2, np.float32)])
    (tmp_path / "bert_config.json").write_text((GOLDEN / "config.json").read_text())
    with pytest.raises(UserError, match=r"bert_model.ckpt: a checkpoint of TensorFlow 2"):
        pretrained.read_pretrained(tmp_path)


def test_the_padding_id_is_the_id_of_the_tokenizer(golden, tmp_path):
    """transformers does not train the embedding of the padding id in config.json."""
    pieces = [golden.tokenizer.pieces[i] for i in (1, 0, *range(2, golden.tokenizer.vocab_size))]
    huggingface.write(tmp_path, golden.config, golden.params, WordPiece(pieces, lowercase=True))
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == 1 == pieces.index("[PAD]")


def test_mismatched_labels_are_refused_when_needed(golden, tmp_path):
    head = {"dense": {"kernel": np.ones((32, 3), np.float32), "bias": np.zeros(3, np.float32)}}
    params = {"bert": golden.params["bert"], "classifier": head}
    huggingface.write(tmp_path / "a", golden.config, params, golden.tokenizer, "BertForSequenceClassification")
    edit(tmp_path / "a" / "config.json", id2label={"0": "x", "1": "y"})
    source = pretrained.read_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match="id2label has 2 different labels, but the classifier has 3 rows"):
        list(classify.TASK.predict(source, [("ship",)]))
    conversion.convert(tmp_path / "a", tmp_path / "b", "huggingface", "BertModel")
    with pytest.raises(UserError, match="id2label has 2 different labels, but the classifier has 3 rows"):
        conversion.convert(tmp_path / "a", tmp_path / "c", "huggingface")


def test_nan_outputs_raise_an_error_in_prediction(golden):
    """Classes and tokens are predicted."""
    head = {"dense": {"kernel": np.full((32, 3), np.nan, np.float32), "bias": np.zeros(3, np.float32)}}
    source = dataclasses.replace(golden, params=golden.params | {"classifier": head})
    for predict, texts in ((classify.TASK.predict, [("ship",)]), (ner.TASK.predict, [("ship sails",)])):
        with pytest.raises(UserError, match="the checkpoint's outputs are NaN"):
            list(predict(source, texts))
    params = jax.tree.map(lambda x: x * np.float32(np.nan), golden.params)
    with pytest.raises(UserError, match="the checkpoint's outputs are NaN"):
        list(fill_mask.fill_masks(BertForMaskedLM(golden.config), params, golden.tokenizer, ["a [MASK]"]))


def test_an_untied_decoder_is_refused_when_tokens_are_predicted(golden, folder, tmp_path):
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
    safetensors.numpy.save_file(tensors, path)
    edit(folder / "config.json", tie_word_embeddings=False)
    source = pretrained.read_pretrained(folder)
    assert source.params.keys() == {"bert", "next_sentence"} and not source.predicts_words
    assert "decoder.weight is not tied to the word embeddings" in source.no_words_reason
    assert "cls.predictions.decoder.weight" in source.ignored
    conversion.convert(folder, tmp_path / "encoder", "huggingface", "BertModel")
    encoder = jax.tree.map(jnp.asarray, {"bert": golden.params["bert"]})
    assert initialization.initialize(encoder, folder).keys() == {"bert"}
    with pytest.raises(UserError, match=r"init_checkpoint = .* is not tied to the word embeddings"):
        initialization.initialize(jax.tree.map(jnp.asarray, golden.params), folder)


def test_bfloat16_tensors_are_read_and_unknown_tensors_ignored(golden, folder):
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    rough = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    safetensors.numpy.save_file(rough | {"adapter.weight": np.ones((2, 32), np.float32)}, path)
    read = pretrained.read_pretrained(folder)
    assert read.ignored == ["adapter.weight"]
    a, b = (x.params["bert"]["pooler"]["dense"]["kernel"] for x in (read, golden))
    assert a.dtype == np.float32 and 0 < np.abs(a - b).max() < 1e-2

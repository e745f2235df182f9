"""Folders with several forms, or with contradictory files, compared with transformers: equal numbers, or one line."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from google.protobuf import runtime_version

from bertjax.common.errors import UserError
from bertjax.config.model_config import Compute
from bertjax.interop import conversion, hf_tokenizer, huggingface, pretrained
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM, word_logits
from tests.interop.test_families_parity import MODELS, batch_of, save_theirs
from tests.interop.test_tokenizers_parity import FOLDERS, texts_for
from tests.markers import slow_case

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra_packages

WEIGHTS = "model.safetensors"
MASKED_LM = {"xlnet": "LMHeadModel"}  # the suffixes of other classes with a masked-LM head than ForMaskedLM


def edit(path, **changes):
    """Changes fields of a JSON file; a field of `...` is removed."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def test_every_model_type_with_a_masked_lm_head_is_compared():
    kinds = {kind.replace("_", "-") for kind in families.by_model_type().keys() - {"gpt2", "neobert"}}
    assert kinds <= {*MODELS}  # transformers has no class of NeoBERT


@functools.cache
def predictor(config, name: str):
    """Returns a compiled function from params to logits of a masked-LM head."""
    batch = batch_of(name, 9)[0]

    def predict(model):
        return word_logits(model.bert, model.masked_lm, model.bert.encode(*batch), np.tile(np.arange(9), (2, 1)))

    return jax.jit(functools.partial(BertForMaskedLM(config).apply, method=predict))


def logits_of_both(folder, name: str, their_class):
    """Returns the logits of transformers, and the logits or the reason of a refusal of bertjax."""
    their_model, loaded = their_class.from_pretrained(folder, output_loading_info=True)
    (_, inside, _), arguments = batch_of(name, 9)
    with torch.no_grad():
        theirs = their_model.eval()(**arguments).logits.numpy()
    try:
        source = pretrained.read_pretrained(folder)
    except UserError as error:
        return theirs, str(error)
    if not source.predicts_words:
        return theirs, source.no_words_reason
    assert not loaded["missing_keys"]  # transformers initializes these tensors at random
    ours = predictor(source.config, name)({"params": source.params})[..., :150]
    return theirs * inside[..., None], ours * inside[..., None]


FAST = ("eurobert", "modernbert")


@pytest.mark.parametrize("name", [name if name in FAST else slow_case(name) for name in MODELS])
def test_tied_and_untied_decoders_equal_transformers_or_are_refused(name, tmp_path):
    """The word embeddings and the decoder, and two biases, are equal, different or alone in the folder."""
    their_model = save_theirs(tmp_path, name, head := MASKED_LM.get(name, "ForMaskedLM"))
    their_model.save_pretrained(tmp_path, save_original_format=False)  # the names of the class, not of published code
    their_class, default = getattr(transformers, f"{MODELS[name][0]}{head}"), MODELS[name][2].tie_word_embeddings
    tensors, tied = safetensors.numpy.load_file(tmp_path / WEIGHTS), their_class._tied_weights_keys
    (weight,) = (key for key in tied if key.endswith(".weight"))
    bias = next((key for key in tied if key.endswith(".bias")), "")
    others = {key: tensor for key, tensor in tensors.items() if key not in tied}
    words, states = others[tied[weight]], ("absent", "equal", "different")
    for stated, decoder, second_bias in itertools.product((..., True, False), states, states if bias else ("equal",)):
        edit(tmp_path / "config.json", tie_word_embeddings=stated)
        copies = {"absent": {}, "equal": {weight: words}, "different": {weight: words[::-1].copy()}}[decoder]
        if bias and second_bias != "absent":
            copies[bias] = others[tied[bias]] + (second_bias == "different")
        safetensors.numpy.save_file(others | copies, tmp_path / WEIGHTS, {"format": "pt"})
        theirs, ours = logits_of_both(tmp_path, name, their_class)
        is_tied, case = default if stated is ... else stated, f"{stated} {decoder} {second_bias}"
        if isinstance(ours, str):
            is_whole = {"equal"} == {decoder, second_bias}
            is_tied_alone = is_tied and decoder == "absent" and second_bias != "different"
            assert ours and "\n" not in ours and not is_whole and not is_tied_alone, case
            assert is_tied or default or decoder == "absent", case  # a family with a separate decoder reads it
        else:
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=case)


# Rotary positions.

ROPE = "rope_parameters"
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BASE, LOCAL = {"rope_theta": 99.0}, {"rope_type": "default", "rope_theta": 98.0}
OLD = {"eurobert": {ROPE: ..., "rope_theta": 777.0},
       "modernbert": {ROPE: ..., "global_rope_theta": 777.0, "local_rope_theta": 55.0},
       **{name: {ROPE: ..., "rope_theta": 777.0} for name in ("nomic-bert", "gte", "jina-embeddings-v3")}}  # fmt: skip
LAYER_TYPES = {"modernbert", "ultrabert"}  # the families with rotary positions by the type of a layer


def rope_forms():
    """Yields a family, fields of config.json, and the beginning of the error message; "" if the folder is read."""
    for name, old in OLD.items():
        yield name, old, ""
        yield name, old | {"rope_scaling": LINEAR | BASE}, ""
        yield name, old | {"rope_scaling": LINEAR}, ""
        old_type = {"type": "linear", "factor": 4.0}
        refusal = "rope_scaling.type is 'linear'; expected 'default'" if name == "modernbert" else ""
        yield name, old | {"rope_scaling": old_type}, refusal
        for rope in (LINEAR | BASE, YARN | BASE, LLAMA3 | BASE, {"rope_type": "yarn", "factor": 4.0, **BASE}):
            whole = {"full_attention": rope, "sliding_attention": LOCAL} if name in LAYER_TYPES else rope
            yield name, {ROPE: whole}, ""
        new = BASE | {"rope_type": "default"}
        new = {"full_attention": new, "sliding_attention": LOCAL} if name in LAYER_TYPES else new
        # The two forms contradict each other.
        yield name, old | {ROPE: new}, ""
        yield name, old | {ROPE: new, "rope_scaling": LINEAR}, ""
        yield name, old | {ROPE: new, "rope_scaling": {}}, ""
    yield "ultrabert", {ROPE: {"full_attention": YARN | BASE, "sliding_attention": LOCAL}}, ""
    beside = {"original_max_position_embeddings": 8}
    yield "eurobert", beside | {ROPE: {"rope_type": "yarn", "factor": 4.0, **BASE}}, ""
    yield "eurobert", {ROPE: LINEAR | BASE | {"type": "yarn"}}, "rope_parameters.type is 'yarn'; expected 'linear'"
    yield "eurobert", {ROPE: {"full_attention": LOCAL}}, "rope_parameters.full_attention .* is not supported"
    both = {ROPE: {"full_attention": YARN | BASE, "sliding_attention": LOCAL}, "rope_scaling": LINEAR}
    yield "modernbert", both, "rope_scaling.original_max_position_embeddings 16 is not supported"


FORMS = [form if form[0] in ("eurobert", "modernbert") else slow_case(*form) for form in rope_forms()]


@pytest.mark.parametrize("name, fields, message", FORMS)
def test_rope_fields_of_all_versions_equal_transformers(name, fields, message, tmp_path):
    """The folder is read, and written with the same positions."""
    save_theirs(tmp_path / "theirs", name, "Model")
    edit(tmp_path / "theirs/config.json", **fields)
    if message:
        with pytest.raises(UserError, match=message):
            pretrained.read_pretrained(tmp_path / "theirs")
        return
    source, (batch, arguments) = pretrained.read_pretrained(tmp_path / "theirs"), batch_of(name, 41)
    family = families.family_of(source.config)
    encode = functools.partial(family.build(source.config, Compute()).apply, method="encode")
    states = jax.jit(encode)({"params": source.params["bert"]}, *batch)
    conversion.convert(tmp_path / "theirs", tmp_path / "back", "huggingface")
    for folder in ("theirs", "back"):
        with torch.no_grad():
            their_model = transformers.AutoModel.from_pretrained(tmp_path / folder).eval()
            expected = their_model(**arguments).last_hidden_state.numpy()
        np.testing.assert_allclose(states * batch[1][..., None], expected * batch[1][..., None], atol=1e-4)


def test_every_family_with_rotary_scalings_is_compared():
    for kind, family in families.by_model_type().items():
        fields = [field.name for field in dataclasses.fields(family.config_class) if "rope_scaling" in field.name]
        assert kind.replace("_", "-") in {*OLD, *LAYER_TYPES} or not fields, kind


# Weights.


@pytest.mark.parametrize("name", ["bert", slow_case("eurobert")])
def test_shards_of_both_libraries_are_equal(name, tmp_path, monkeypatch):
    their_model = save_theirs(tmp_path / "whole", name, "ForMaskedLM")
    their_model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert len([*(tmp_path / "theirs").glob("*.safetensors")]) > 2
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 30_000)
    conversion.convert(tmp_path / "theirs", tmp_path / "ours", "huggingface")
    assert len([*(tmp_path / "ours").glob("*.safetensors")]) > 2
    back, loaded = type(their_model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loaded.values())
    before, after = their_model.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_shards_of_pickles_are_read(tmp_path):
    their_model = save_theirs(tmp_path, "bert", "ForMaskedLM")
    expected = pretrained.read_pretrained(tmp_path).params
    (tmp_path / WEIGHTS).unlink()
    state = their_model.state_dict()
    files = {key: f"pytorch_model-{1 + number % 2:05}-of-00002.bin" for number, key in enumerate(state)}
    for file in {*files.values()}:
        torch.save({key: tensor for key, tensor in state.items() if files[key] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert jax.tree.all(jax.tree.map(np.array_equal, pretrained.read_pretrained(tmp_path).params, expected))
    (tmp_path / file).unlink()
    with pytest.raises(UserError, match=f"{file}: missing, but listed in .*pytorch_model.bin.index.json; copy"):
        pretrained.read_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", slow_case("bfloat16"), slow_case("float64")])
def test_the_dtype_of_transformers_is_read(dtype, tmp_path):
    their_model = save_theirs(tmp_path, "bert", "ForMaskedLM").to(getattr(torch, dtype))
    their_model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    embedding = pretrained.read_pretrained(tmp_path).params["bert"]["embeddings"]["position"]["embedding"]
    expected = their_model.bert.embeddings.position_embeddings.weight.detach().float().numpy()
    assert embedding.dtype == np.float32 and (embedding == expected).all()
    conversion.convert(tmp_path, tmp_path / "out", "huggingface")
    assert transformers.BertForMaskedLM.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_floats_of_8_bits_in_a_pickle_are_refused(tmp_path):
    their_model = save_theirs(tmp_path, "bert", "ForMaskedLM")
    (tmp_path / WEIGHTS).unlink()
    state = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in their_model.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has dtype float8_e4m3fn; expected floats of 16, 32 or 64 bits"):
        pretrained.read_pretrained(tmp_path)


# Tokenizers.


@pytest.fixture(autouse=True)
def any_protobuf(monkeypatch):
    """The protobuf module that transformers uses for sentencepiece models requires the newest protobuf."""
    monkeypatch.setattr(runtime_version, "ValidateProtobufRuntimeVersion", lambda *_: None)


CLASSES = sorted({*itertools.chain(*hf_tokenizer.CLASSES.values()), "LlamaTokenizer"})
# {tokenizer: classes with equal ids}, beside the general classes of tokenizer.json.
SAME = {
    "wordpiece tokenizer.json True": (
        "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer",
    ),
    "mpnet tokenizer.json": ("MPNetTokenizer",),
    "learnt bpe": (), "learnt sentencepiece": (), "bytes": (), "prefixed bpe": (), "eurobert": (),
    "modernbert": ("GPT2Tokenizer", "RobertaTokenizer"),
    "roberta": ("RobertaTokenizer",),
    "xlm-roberta": ("XLMRobertaTokenizer", "CamembertTokenizer"),
    "deberta-v2": ("DebertaV2Tokenizer",), "albert": ("AlbertTokenizer",), "cased albert": ("AlbertTokenizer",),
    "xlnet True True": ("XLNetTokenizer",), "xlnet False True": ("XLNetTokenizer",),
    "mmbert": ("GemmaTokenizer",), "gemma": ("GemmaTokenizer",),
}  # fmt: skip
KINDS = ("wordpiece tokenizer.json True", "roberta", "xlm-roberta", "learnt bpe")


@pytest.mark.parametrize("name", [name if name in LAYER_TYPES else slow_case(name) for name in SAME])
def test_a_class_that_contradicts_the_file_gives_equal_ids_or_is_refused(name, tmp_path):
    FOLDERS[name](tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    accepted = {"PreTrainedTokenizer", "TokenizersBackend", *SAME[name]}
    read = set()
    for stated in (*CLASSES, ...):
        edit(settings, tokenizer_class=stated)
        try:
            ours = hf_tokenizer.read_folder_tokenizer(tmp_path)
        except UserError as error:
            assert "\n" not in str(error)
            continue
        read.add(stated)
        theirs, texts = transformers.AutoTokenizer.from_pretrained(tmp_path), texts_for(ours.kind, name)
        alone = theirs(texts, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ours.encode_ids(texts) == alone, stated
        if name != "prefixed bpe":  # the template of this tokenizer is empty
            pair = theirs(texts[0], texts[1], split_special_tokens=True).input_ids
            assert ours.framed(alone[0], alone[1]) == pair, stated
    assert read - {...} == accepted


@pytest.mark.parametrize("name, settings, message", [
    ("older camembert", dict(tokenizer_class="XLMRobertaTokenizer"), "XLMRobertaTokenizer has other special tokens"),
    ("older xlm-roberta", dict(tokenizer_class="XLNetTokenizer"), "XLNetTokenizer has other special tokens than sente"),
])  # fmt: skip
def test_a_class_that_contradicts_older_files_is_refused(name, settings, message, tmp_path):
    FOLDERS[name](tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f"{message}.*; correct tokenizer_class"):
        hf_tokenizer.read_folder_tokenizer(tmp_path)


def test_a_byte_fallback_with_another_pre_tokenizer_than_gemma_is_refused(tmp_path):
    FOLDERS["mmbert"](tmp_path)
    edit(tmp_path / "config.json", model_type="xlm-roberta-xl")
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="GemmaTokenizer")
    with pytest.raises(UserError, match=r"GemmaTokenizer has another pre_tokenizer than tokenizer.json; set"):
        hf_tokenizer.read_folder_tokenizer(tmp_path)


def test_a_normalizer_that_transformers_5_ignores_is_named(tmp_path, capfd):
    """transformers 4 uses the normalizer of the file, and published folders of DeBERTa-v3 have such a file."""
    FOLDERS["deberta-v2"](tmp_path)
    hf_tokenizer.read_folder_tokenizer(tmp_path)
    assert "ignores the normalizer" not in capfd.readouterr().err
    edit(tmp_path / "tokenizer.json", normalizer={"type": "NFKC"})
    hf_tokenizer.read_folder_tokenizer(tmp_path)
    expected = "DebertaV2Tokenizer of transformers 5 ignores the normalizer of tokenizer.json, NFKC, which bertjax and"
    assert expected in capfd.readouterr().err

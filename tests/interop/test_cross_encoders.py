"""Folders of CrossEncoder: equal scores in both directions, for each family and each version of the layout."""

import contextlib
import json

import flax.linen as nn
import jax
import numpy as np
import pytest
import yaml
from etils import epath

import bertjax
from bertjax.common.errors import UserError
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning.task import _init
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.interop.cross_encoder import SIGMOID
from bertjax.interop.sentence_transformers import IDENTITY, MODULES, SETTINGS
from bertjax.reranking.ranking import Ranker
from bertjax.text import vocabulary_learning
from bertjax.training.checkpoints import checkpoint as stored
from bertjax.training.checkpoints.workdir import RunInfo, tokenizer_entry, write_info
from bertjax.training.scores import Scores
from experiments import classify, rerank
from tests.checkpoints import on_one_device  # noqa: F401
from tests.conftest import make_corpus
from tests.finetuning.test_classify import write_table
from tests.interop.test_golden import edit
from tests.text.test_tokenizer import of_mpnet

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.extra_packages, pytest.mark.usefixtures("on_one_device")]

LINES = [line for line in make_corpus(30).splitlines() if line]
LONGEST = 21  # tokens of a pair: an even and, with 3 or 4 special tokens, an odd number of tokens of the texts
QUERY = "the ship"
DOCUMENTS = ["x", LINES[0], " ".join(LINES[2:5]), "Café, naïve?", LINES[1]]
PAIRS = [(QUERY, document) for document in DOCUMENTS]
PAIRS += [(LINES[2], " ".join(LINES[:2])), (" ".join(LINES[:4]), "x"), (" ".join(LINES[:2]), " ".join(LINES[2:5]))]
SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=66,
    initializer_range=0.3,
)  # fmt: skip
FAMILIES = {  # model type: fields of the config
    "bert": SIZES,
    "roberta": SIZES | dict(type_vocab_size=1),
    "xlm-roberta": SIZES | dict(type_vocab_size=1),
    "electra": SIZES | dict(embedding_size=16),
    "mpnet": SIZES,
    "albert": SIZES | dict(embedding_size=16),
    "megatron-bert": SIZES,
    "xlm-roberta-xl": SIZES | dict(type_vocab_size=1),
    "modernbert": SIZES | dict(local_attention=8, global_attn_every_n_layers=2),
    "distilbert": dict(dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=66, initializer_range=0.3),
}
MOST_SLOW = ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "bert")]
VERSIONS = ("3", "4", "5", "5.4")  # before version 6; since 5.4 with modules.json


def made_classifier(folder, family: str, labels: int = 1):
    """Writes a random classifier of transformers, whose tokenizer truncates pairs at `LONGEST` tokens."""
    kind = "bpe" if family in ("roberta", "modernbert") else "wordpiece"
    counts = vocabulary_learning.count_words(kind, LINES)
    tokenizer = vocabulary_learning.learn_new_vocabulary(kind, counts, 330 if kind == "bpe" else 150)
    tokenizer = of_mpnet(tokenizer) if family == "mpnet" else tokenizer
    ids = dict(pad_token_id=tokenizer.pad_id, cls_token_id=tokenizer.cls_id, sep_token_id=tokenizer.sep_id)
    torch.manual_seed(0)
    fields = FAMILIES[family] | ids | dict(vocab_size=tokenizer.vocab_size, num_labels=labels)
    config = transformers.AutoConfig.for_model(family, **fields)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    folder = epath.Path(folder)
    for name, content in huggingface.tokenizer_definition(huggingface.read_config(folder / "config.json"), tokenizer,
                                                          LONGEST).items():  # fmt: skip
        (folder / name).write_text(content)
    tokenizer.save(folder)
    return folder


def made_cross_encoder(folder, family: str, version: str, activation: str):
    """Writes a folder of CrossEncoder in the layout of a version."""
    made_classifier(folder / "plain", family)
    if version == "6":
        library(folder / "plain").save_pretrained(str(folder / "saved"), create_model_card=False)
        edit(folder / "saved" / SETTINGS, activation_fn=activation)
        return folder / "saved"
    if version == "3":
        edit(folder / "plain/config.json", sbert_ce_default_activation_function=activation)
    else:
        section = {"activation_fn": activation, "version": f"{version}.0"}
        edit(folder / "plain/config.json", sentence_transformers=section)
    if version == "5.4":
        module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
        settings = {"model_type": "CrossEncoder", "__version__": {"sentence_transformers": "5.4.0"}}
        transformer = {"transformer_task": "sequence-classification", "module_output_name": "scores"}
        files = {MODULES: [module], SETTINGS: settings, "sentence_bert_config.json": transformer}
        for name, content in files.items():
            (folder / "plain" / name).write_text(json.dumps(content))
    return folder / "plain"


def library(folder):
    return sentence_transformers.CrossEncoder(str(folder), device="cpu", local_files_only=True)


def ranker(folder) -> Ranker:
    return Ranker(pretrained.read_with_tokenizer(folder, "float32"))


def assert_equal_scores(folder, expected):
    np.testing.assert_allclose(ranker(folder).scores(PAIRS), expected, atol=1e-4)


def assert_equal_rankings(ranked, expected):
    """Documents that are equal after truncation have equal scores, so that their order is not defined."""
    scores = {row["corpus_id"]: row["score"] for row in expected}
    assert sorted(row.index for row in ranked) == sorted(scores)
    np.testing.assert_allclose([scores[row.index] for row in ranked], sorted(scores.values(), reverse=True), atol=1e-5)


@pytest.mark.parametrize(
    "family, version, activation",
    [("bert", "6", SIGMOID), ("bert", "3", IDENTITY)]
    + [pytest.param("bert", version, SIGMOID, marks=pytest.mark.slow) for version in VERSIONS]
    + [pytest.param(family, "6", IDENTITY, marks=pytest.mark.slow) for family in FAMILIES],
)
def test_scores_of_a_folder_equal_the_scores_of_the_library(family, version, activation, tmp_path):
    folder = made_cross_encoder(tmp_path, family, version, activation)
    model = library(folder)
    expected = model.predict(PAIRS)
    assert model.max_seq_length == LONGEST and np.ptp(expected) > 0.01
    assert_equal_scores(folder, expected)
    assert_equal_rankings(bertjax.load(folder, dtype="float32").rank(QUERY, DOCUMENTS), model.rank(QUERY, DOCUMENTS))
    conversion.convert(folder, tmp_path / "ours", "bertjax")
    for source, to in ((tmp_path / "ours", "huggingface"), (tmp_path / "ours", "sentence-transformers"),
                       (folder, "sentence-transformers")):  # fmt: skip
        conversion.convert(source, tmp_path / f"{source.name}-{to}", to)
        written = library(tmp_path / f"{source.name}-{to}")
        np.testing.assert_allclose(written.predict(PAIRS), expected, atol=1e-5)
        assert written.max_seq_length == LONGEST
        assert_equal_scores(tmp_path / f"{source.name}-{to}", expected)


def test_the_default_prompt_precedes_the_first_text_in_both_directions(tmp_path, capsys):
    folder = made_cross_encoder(tmp_path, "bert", "6", SIGMOID)
    plain = library(folder).predict(PAIRS)
    prompts = {"query": "the ship ", "empty": ""}
    edit(folder / SETTINGS, prompts=prompts, default_prompt_name="empty")
    assert_equal_scores(folder, plain)
    assert "ignored prompts, which a CrossEncoder applies only by name: query\n" in capsys.readouterr().err
    edit(folder / SETTINGS, default_prompt_name="query")
    expected = library(folder).predict(PAIRS)
    assert not np.allclose(expected, plain, atol=1e-3)
    assert_equal_scores(folder, expected)
    assert [row["score"] for row in bertjax.load(folder, dtype="float32").predict(PAIRS)] == pytest.approx(
        expected, abs=1e-4
    )
    conversion.convert(folder, tmp_path / "ours", "bertjax")
    conversion.convert(tmp_path / "ours", tmp_path / "theirs", "sentence-transformers")
    for converted in (tmp_path / "ours", tmp_path / "theirs"):
        assert_equal_scores(converted, expected)
    written = library(tmp_path / "theirs")
    assert (written.prompts, written.default_prompt_name) == (prompts, "query")
    np.testing.assert_allclose(written.predict(PAIRS), expected, atol=1e-5)


def test_the_identity_of_the_scores_depends_on_the_prompt(tmp_path):
    """`mine` keeps the scores of a reranker by its identity."""
    folder, identities = made_cross_encoder(tmp_path, "bert", "6", SIGMOID), set()
    for prompt in ("", "the ship ", "x "):
        edit(folder / SETTINGS, prompts={"query": prompt}, default_prompt_name="query")
        identities.add(ranker(folder).identity())
    assert len(identities) == 3


def test_a_teacher_with_a_prompt_is_refused_for_windows(tmp_path):
    folder = made_cross_encoder(tmp_path, "bert", "6", SIGMOID)
    edit(folder / SETTINGS, prompts={"query": "the ship "}, default_prompt_name="query")
    rows = [{"text": LINES[i], "label": str(i / 8)} for i in range(8)]
    write_table(tmp_path / "train.csv", rows)
    write_table(tmp_path / "dev.csv", rows)
    config = classify.get_config()
    config.data.update(path=str(tmp_path), is_number=True, windows="mean", doc_stride=4)
    config.update(dict(init_checkpoint=str(folder), max_seq_length=LONGEST, dtype="float32"))
    config.distill.teacher = str(folder)
    resolved = finetuning_run.resolve(config, None).config
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="has the default prompt 'the ship ', which windows of texts cannot contain"):
        finetuning_run.load_inputs(resolved, tmp_path / "run", None)


def test_an_unknown_default_prompt_is_refused_in_one_line(tmp_path):
    folder = made_cross_encoder(tmp_path, "bert", "6", SIGMOID)
    edit(folder / SETTINGS, prompts={"query": "the ship "}, default_prompt_name="document")
    with pytest.raises(UserError) as error:
        bertjax.load(folder)
    assert "default_prompt_name is 'document', expected null or one of query" in str(error.value)
    assert "\n" not in str(error.value)


def config_for(folder, data, **fields):
    config = rerank.get_config()
    config.data.update(path=str(data), form="lists", texts="query,documents", label="grades")
    config.update(dict(init_checkpoint=str(folder), batch_size=8, max_seq_length=LONGEST, dtype="float32"))
    config.loss.name = "list_net"
    config.update_from_flattened_dict(fields)
    return config


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    rows = [{"query": LINES[i], "documents": LINES[i + 1 : i + 4], "grades": [2, 1, 0]} for i in range(16)]
    write_table(folder / "train.jsonl", rows)
    write_table(folder / "dev.jsonl", rows[:8])
    return folder


def made_run(workdir, folder, data, **fields):
    """A run of rerank with the params of a folder of CrossEncoder."""
    config, _ = finetuning_run.resolve(config_for(folder, data, **fields), None)
    source = pretrained.read_pretrained(folder)
    stored.write_params(workdir, source.params)
    info = RunInfo(config, source.architecture, (), tokenizer_entry(source.tokenizer), 16, problem_type="regression")
    write_info(workdir, info, source.tokenizer)
    stored.write_scores(workdir, 0, Scores({"ndcg@10": 0.87654}))
    return workdir


@pytest.mark.parametrize("to", ["huggingface", "sentence-transformers"])
@pytest.mark.parametrize("family", MOST_SLOW)
def test_a_run_of_rerank_opens_as_a_cross_encoder(family, to, data, tmp_path):
    run = made_run(tmp_path / "run", made_classifier(tmp_path / "made", family), data)
    scores, output = ranker(run).scores(PAIRS), tmp_path / "out"
    printed = conversion.convert(run, output, to, license_name="mit")
    assert printed.startswith(f"bertjax -> {to}") and "left out" not in printed
    model = library(output)
    assert isinstance(model.activation_fn, torch.nn.Identity) and model.max_seq_length == LONGEST
    np.testing.assert_allclose(model.predict(PAIRS), scores, atol=1e-4)
    assert_equal_rankings(bertjax.load(run).rank(QUERY, DOCUMENTS), model.rank(QUERY, DOCUMENTS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(output)
    inputs = tokenizer(*map(list, zip(*PAIRS)), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        np.testing.assert_allclose(classifier(**inputs).logits[:, 0], scores, atol=1e-4)
    assert_equal_scores(output, scores)


def test_a_run_with_a_prompt_opens_as_a_cross_encoder(data, tmp_path):
    fields = {"data.query_prompt": "query: "}
    run = made_run(tmp_path / "run", made_classifier(tmp_path / "made", "bert"), data, **fields)
    conversion.convert(run, tmp_path / "out", "sentence-transformers")
    model, scores = library(tmp_path / "out"), ranker(run).scores(PAIRS)
    assert (model.prompts, model.default_prompt_name) == ({"query": "query: "}, "query")
    np.testing.assert_allclose(model.predict(PAIRS), scores, atol=1e-4)
    np.testing.assert_allclose(model.predict(PAIRS, prompt="query: "), scores, atol=1e-4)
    assert not np.allclose(model.predict(PAIRS, prompt=""), scores, atol=1e-3)


def test_a_run_takes_over_the_prompt_and_the_length_of_a_cross_encoder(data, tmp_path):
    folder = made_cross_encoder(tmp_path, "bert", "6", SIGMOID)
    edit(folder / SETTINGS, prompts={"query": "the ship "}, default_prompt_name="query")
    config = config_for(folder, data, max_seq_length=rerank.get_config().max_seq_length)
    resolution = finetuning_run.resolve(config, None)
    resolved = resolution.config
    assert (resolved.data.query_prompt, resolved.max_seq_length) == ("the ship ", LONGEST)
    assert resolution.decisions == (f"from {folder}: max_seq_length = {LONGEST}, data.query_prompt = 'the ship '",)
    config = config_for(folder, data, **{"max_seq_length": 20, "data.query_prompt": "a "})
    resolved = finetuning_run.resolve(config, None).config
    assert (resolved.data.query_prompt, resolved.max_seq_length) == ("a ", 20)
    config = config_for(folder, data, max_seq_length=rerank.get_config().max_seq_length)
    with config.unlocked():
        config.overrides = ("data.query_prompt",)  # as the command line does
    resolved = finetuning_run.resolve(config, None).config
    assert (resolved.data.query_prompt, resolved.max_seq_length) == ("", LONGEST)
    with config.unlocked():
        config.overrides = ("max_seq_length",)
    with pytest.raises(UserError, match=r"config.max_seq_length = 256: .* has 66 positions only"):
        finetuning_run.resolve(config, None)


def test_the_model_card_ranks_documents(data, tmp_path, monkeypatch):
    run = made_run(tmp_path / "run", made_classifier(tmp_path / "made", "bert"), data)
    for to in ("huggingface", "sentence-transformers"):
        conversion.convert(run, tmp_path / to, to, license_name="mit")
        _, metadata, text = (tmp_path / to / "README.md").read_text().split("---\n", 2)
        metadata = yaml.safe_load(metadata)
        assert metadata["pipeline_tag"] == "text-ranking" and metadata["library_name"] == "sentence-transformers"
        assert {"sentence-transformers", "cross-encoder", "reranker", "bertjax"} < set(metadata["tags"])
        assert "for the task `rerank`" in text and "| ndcg@10 | 0.8765 |" in text and "| loss.name | list_net |" in text
        monkeypatch.chdir(tmp_path)
        code = text.split("```python\n")[1].split("```")[0]
        with contextlib.redirect_stdout(None):
            exec(code, {})  # the example of the card
    conversion.convert(run, tmp_path / "encoder", "huggingface", architecture="BertModel")
    assert 'pipeline_tag: "feature-extraction"' in (tmp_path / "encoder/README.md").read_text()


def test_windows_are_not_written(data, tmp_path):
    fields = {"data.windows": "max", "data.doc_stride": 4}
    run = made_run(tmp_path / "run", made_classifier(tmp_path / "made", "bert"), data, **fields)
    printed = conversion.convert(run, tmp_path / "out", "sentence-transformers")
    assert "data.windows = 'max': long texts are truncated" in printed


def test_a_classifier_with_several_labels_is_no_cross_encoder(tmp_path):
    folder = made_classifier(tmp_path / "made", "bert", labels=2)
    with pytest.raises(UserError, match="no score of a pair of texts; train it for embeddings or for rerank first"):
        conversion.convert(folder, tmp_path / "out", "sentence-transformers")


@pytest.mark.parametrize("family", MOST_SLOW)
def test_training_starts_with_the_head_of_a_cross_encoder(family, data, tmp_path, capsys):
    folder = made_cross_encoder(tmp_path, family, "6", SIGMOID)
    config, _ = finetuning_run.resolve(config_for(folder, data), None)
    begun = finetuning_run.KIND.open(config, tmp_path / "run", None)
    params = begun.initial_params(nn.meta.unbox(_init(begun.task.loss.model, jax.random.key(0))))
    printed = capsys.readouterr().out
    assert "arrays loaded" in printed and "initialized at random" not in printed and "not used" not in printed
    expected = pretrained.read_pretrained(folder).params
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(params), expected))


def test_a_cross_encoder_is_a_teacher(data, tmp_path):
    """The grades of a student are the logits of CrossEncoder, without the sigmoid."""
    folder = made_cross_encoder(tmp_path, "bert", "6", SIGMOID)
    config, _ = finetuning_run.resolve(config_for(folder, data, **{"distill.teacher": str(folder)}), None)
    (tmp_path / "run").mkdir()
    grades = finetuning_run.load_inputs(config, tmp_path / "run", None).data.train.grades
    documents = [(LINES[0], LINES[i]) for i in range(1, 4)]
    expected = library(folder).predict(documents, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(grades[0], expected, atol=1e-4)

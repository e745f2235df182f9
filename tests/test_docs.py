"""README and docs/: links have targets, and the flags and files in the text exist."""

import dataclasses
import functools
import pathlib
import re

import pytest

from bertjax.common.errors import UserError
from bertjax.config.experiments import load
from bertjax.config.model_config import BertConfig
from bertjax.interop import hf_tokenizer, huggingface
from bertjax.launch.overrides import find_field
from bertjax.models import families, rope
from bertjax.models.heads import BertForMaskedLM, BertForSequenceClassification
from bertjax.text import vocabulary_learning
from bertjax.text.tokenizer import WordPiece
from tests.conftest import make_corpus
from tests.models.test_modernbert import random_params
from tests.pages import PAGES, ROOT


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the anchors of the headings of a page in GitHub's notation."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_is_linked_from_the_index_and_in_the_menu_of_the_site():
    index, menu = (ROOT / "docs" / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert len(pages) > 20 and "(docs/index.md)" in (ROOT / "README.md").read_text()
    assert pages == set(re.findall(r"\(([\w/-]+\.md)\)", index)) | {"index.md"}
    made = {"results/comparisons.md", "results/benchmarks.md", "tutorials/python.md"}
    listed = set(re.findall(r": ([\w/-]+\.md)$", menu, re.M))
    assert pages | made == {page for page in listed if not page.startswith("reference/")}


# {suffix of a class of BERT: its name in the table of docs/checkpoints.md}
HEADS = {
    "ForMaskedLM": "words", "ForPreTraining": "pre-training", "ForNextSentencePrediction": "pairs",
    "ForSequenceClassification": "texts", "ForTokenClassification": "tokens", "ForQuestionAnswering": "spans",
    "ForMultipleChoice": "choices",
}  # fmt: skip


def row_of_formats(kind: str) -> str:
    """Returns the row of a model type in the table of docs/checkpoints.md."""
    family, name = families.by_model_type()[kind], re.sub("[-_]", "", kind)
    layout, fields = family.huggingface, {field.name for field in dataclasses.fields(family.config_class)}
    suffixes = [
        architecture[len(name) :] for architecture in layout.architectures if architecture.lower().startswith(name)
    ]
    suffixes = [layout.bert_suffixes.get(suffix, suffix) for suffix in suffixes]
    heads = [head for suffix, head in HEADS.items() if suffix in suffixes]
    stated = hf_tokenizer.BY_MODEL_TYPE.get(kind, "")
    kinds = (
        [tokenizer for tokenizer, classes in hf_tokenizer.CLASSES.items() if stated in classes] if stated else ["any"]
    )
    always = "tied" if family.word_head(family.config_class()).tied else "untied"
    decoder = "tied, untied" if "tie_word_embeddings" in fields else always
    scalings = ", ".join(rope.TYPES) if any("rope_scaling" in field for field in fields) else "-"
    return f"| `{kind}` | {', '.join(heads) or 'read only'} | {', '.join(kinds)} | {decoder} | {scalings} |"


def test_the_table_of_formats_equals_the_code():
    """If this test fails, copy the row into docs/checkpoints.md."""
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    section = page.split("## Formats of each family\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `.*", section, re.M)[1:]  # without the head of the table
    assert rows == [row_of_formats(kind) for kind in sorted(families.by_model_type())]


@functools.cache
def configs() -> list:
    return [*map(load, ("base", "classify", "tag", "squad", "adapt", "embed", "rerank", "modern:base", "modern:cores"))]


def has_field(config, field: str) -> bool:
    try:
        return bool(find_field(config, field))
    except UserError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fields_of_the_config_exist(page):
    fields = set(re.findall(r"--config\.([a-z_.]+)=", page.read_text()))
    for field in fields - {"anything", "x.y", "batchsize"}:  # the last field is a mistake in docs/faq.md
        assert any(has_field(config, field) for config in configs()), field


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_checkout_exist(page):
    for path in re.findall(r"`((?:bertjax|experiments|tests|tpu|docs)/[\w/.]+)`", page.read_text()):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"experiments/([\w/]+)\.py", page.read_text()):
        assert (ROOT / f"experiments/{name}.py").exists(), name


@pytest.fixture
def named(tmp_path, monkeypatch):
    """Makes a folder with the files that the Python examples read, and makes it the current folder."""
    lines = [line for line in make_corpus(20).splitlines() if line]
    learnt = vocabulary_learning.learn_new_vocabulary(
        "wordpiece", vocabulary_learning.count_words("wordpiece", lines), 150
    ).pieces
    tokenizer = WordPiece([*learnt, *(f"[unused{i}]" for i in range(30522 - len(learnt)))], lowercase=True)
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    metadata = huggingface.Metadata(("1", "2", "3"))
    for folder, model, *options in (
        ("bert-base-uncased", BertForMaskedLM(config)),
        ("runs/reviews", BertForSequenceClassification(config, 3), "BertForSequenceClassification", metadata),
    ):
        huggingface.write(tmp_path / folder, config, random_params(model, config), tokenizer, *options)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "some.txt").write_text(make_corpus(80))
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_examples_of_the_library_run(named, in_process, monkeypatch, capsys):
    """The examples run in order; the runs that they read were trained before."""
    launched, names, page = [], {}, (ROOT / "docs" / "library.md").read_text()
    monkeypatch.setattr("bertjax.launch.start.launch", lambda *run, began, draw, hooks: launched.append(run))
    for example in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(example, "docs/library.md", "exec"), names)
    (tuned, folder), (trained, _) = launched
    assert (tuned.task, tuned.data.label, folder) == ("classify", "stars", "runs/reviews")
    assert trained.data.records == "records" and names["config"].data.records == ""
    printed = capsys.readouterr().out
    assert printed.startswith("the man went to the [MASK] to buy a [MASK] of milk [[(")
    assert "\nepoch = 3: config has no field 'epoch'; did you mean epochs? " in printed
    assert names["logits"].shape == (2, 3) and names["states"].shape == (2, names["batch"].shape[1], 16)

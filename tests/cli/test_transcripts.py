"""Transcripts of a new user's commands: a review shows each changed message in tests/golden/transcripts.

Numbers, durations and predicted tokens are masked, because they differ between machines and versions. Rewrite the files
with: pytest tests/cli/test_transcripts.py -m "" --update-golden
"""

import csv
import pathlib
import re
import shlex

import pytest

from tests.conftest import TOPICS, make_corpus
from tests.processes import QUICK, run

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transcripts"
TINY = """--config.model.hidden_size=16 --config.model.num_attention_heads=2 --config.model.num_hidden_layers=1
    --config.model.intermediate_size=32"""
MINE = "train --config=text --config.data.corpus=texts/ --config.budget=20k --workdir=runs/mine"


def mask(output: str) -> str:
    """Masks the parts of an output that differ between runs, and drops the lines that only some machines print."""
    output = re.sub(r"^.* so far$\n", "", output, flags=re.MULTILINE)  # a slow machine
    output = re.sub(r"^config\.dtype = 'auto': .*\n", "", output, flags=re.MULTILINE)  # a CPU with bfloat16
    output = re.sub(r"(\[MASK\] \d+: ).*", r"\1PREDICTIONS", output)
    output = re.sub(r'"label": "\w+"', '"label": PREDICTION', output)
    output = re.sub(r"^( +[\d.]+ +\d+: ).*", r"\1DOCUMENT", output, flags=re.MULTILINE)  # a result of search
    output = re.sub(r"\d+:\d\d:\d\d", "H:MM:SS", output)
    output = re.sub(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "N", output)
    return re.sub(r"N [kM]/s", "N/s", output)


def transcript(folder: pathlib.Path, *commands: str) -> str:
    """Runs commands in a folder, and returns the masked transcript."""
    parts = []
    for command in commands:
        name, *arguments = shlex.split(command)
        module = {"train": "main"}.get(name, name)
        result = run(module, *arguments, cwd=folder, **{QUICK: "1"})
        errors = "".join(f"stderr: {line}\n" for line in result.stderr.splitlines())
        status = f"exit status: {result.returncode}\n" if result.returncode else ""
        parts.append(f"$ bertjax {' '.join(command.split())}\n{mask(result.stdout + errors)}{status}")
    return "\n".join(parts)


@pytest.fixture
def golden(request):
    """Returns a function that returns the golden transcript of a name; --update-golden writes the transcript first."""

    def read(name: str, text: str) -> str:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return path.read_text()

    return read


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts and with labelled files."""
    folder = tmp_path_factory.mktemp("transcripts")
    (folder / "texts").mkdir()
    (folder / "texts" / "stories.txt").write_text(make_corpus(300))
    (folder / "reviews").mkdir()
    (folder / "pairs").mkdir()
    for name, seed in (("train", 0), ("dev", 1)):
        sentences = make_corpus(12, seed).replace("\n\n", "\n").splitlines()
        topics = [next(topic for topic, words in TOPICS.items() if line.split()[1] in words) for line in sentences]
        write(folder / "reviews" / f"{name}.csv", ("review", "stars"), zip(sentences, topics))
        pairs = zip(sentences, [line.upper() for line in sentences])
        write(folder / "pairs" / f"{name}.csv", ("anchor", "positive"), pairs)
    return folder


def write(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture(scope="module")
def mine(folder):
    """The transcript of the pre-training on own text, whose run the other commands use."""
    return transcript(folder, MINE)


@pytest.mark.slow
def test_quickstart(folder, golden):
    command = f"train --config=quickstart --workdir=runs/quickstart --config.stages.short.steps=4 {TINY}"
    text = transcript(folder, f"{command} --config.stages.long.steps=2")
    assert text == golden("quickstart", text)


@pytest.mark.slow
def test_own_text(folder, mine, golden):
    text = mine + "\n" + transcript(folder, MINE)
    assert text == golden("own_text", text)


@pytest.mark.slow
def test_predict(folder, mine, golden):
    text = transcript(folder, "predict runs/mine 'The [MASK] saw the ship.'")
    assert text == golden("predict", text)


@pytest.mark.slow
def test_convert(folder, mine, golden):
    text = transcript(folder, "convert runs/mine for-transformers --format=huggingface")
    assert text == golden("convert", text)


@pytest.mark.slow
def test_classify(folder, mine, golden):
    train = """train --config=classify --config.init_checkpoint=runs/mine --config.data.path=reviews/
        --config.data.text=review --config.data.label=stars --config.epochs=1 --workdir=runs/reviews"""
    predict = "predict runs/reviews 'The ship saw the whale.'"
    text = transcript(folder, train, predict)
    assert text == golden("classify", text)


@pytest.mark.slow
def test_embed(folder, mine, golden):
    train = "train --config=embed --config.init_checkpoint=runs/mine --config.data.path=pairs/ --workdir=runs/pairs"
    search = "search runs/pairs --corpus=texts/stories.txt --top_k=2 'a ship and a whale'"
    text = transcript(folder, train, search)
    assert text == golden("embed", text)


def test_mistakes(folder, golden):
    text = transcript(
        folder,
        "train --config=text --config.data.corpus=text/",
        "train --config=text --config.data.corpus=texts/ --config.batchsize=8",
        "train --config=classify --config.init_checkpoint=bert --config.data.path=reviews/",
        "predict runs/none 'The [MASK] saw the ship.'",
        "convert runs/none output --format=pytorch",
    )
    assert text == golden("mistakes", text)

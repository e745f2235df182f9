"""The preparation as Apache Beam pipelines: byte for byte what the local run writes."""

import pytest

from bertjax.config import UserError
from bertjax.data import preparation
from bertjax.data.documents import corpus
from bertjax.data.preparation import blocks
from bertjax.text import learning
from tests.conftest import make_corpus, tiny_config
from tests.data.test_preparation import digest

pytest.importorskip("apache_beam")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Several groups and blocks, with duplicates."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 8000)
    monkeypatch.setattr(corpus, "PORTION_BYTES", 10_000)
    for seed in (1, 2):
        (tmp_path / f"{seed}.txt").write_text(make_corpus(100, seed) + "\n" + make_corpus(40, seed=3))
    config = tiny_config()
    config.data.corpus = [str(tmp_path / "1.txt"), str(tmp_path / "2.txt")]
    config.data.mixture = f"{tmp_path}/2.txt=0.5"
    config.data.cleaning.update(duplicate_documents=True, near_duplicates=True, max_line_documents=1)
    return config


@pytest.mark.slow
def test_the_records_are_those_of_the_local_run(config, tmp_path, in_process, monkeypatch, capsys):
    monkeypatch.setitem(learning.COUNTED_LETTERS, "wordpiece", 200)  # fewer than there are
    config.model.vocab_size = 110
    here = preparation.prepare(config, tmp_path / "here")
    assert "; of words rarer than " in capsys.readouterr().out
    assert here["cleaning"]["duplicate_documents"] == 40 and here["cleaning"]["repeated_lines"] > 0
    left = tmp_path / "beam" / "unfinished" / "beam"  # by a pipeline that was stopped
    left.mkdir(parents=True)
    (left / "words-00000-of-00009").write_text('["nonsense", 1000000]\n')
    (tmp_path / "beam" / "length32").mkdir()
    (tmp_path / "beam" / "length32" / "train-00000-of-00016.tfrecord").write_bytes(b"another's")
    assert preparation.prepare(config, tmp_path / "beam", beam_options=[]) == here
    assert digest(tmp_path / "beam") == digest(tmp_path / "here")


def test_mistakes_are_one_line(config, tmp_path, in_process):
    with (tmp_path / "2.txt").open("a") as file:
        file.write("\n" + "x" * 200_000)
    with pytest.raises(UserError, match=r"^.*2.txt:\d+: a sentence of 200,000 characters[^\n]*$"):
        preparation.prepare(config, tmp_path / "out", beam_options=[])
    assert not (tmp_path / "out" / "manifest.json").exists()

"""Conversion prints each field that it changes, and writes no folder that bertjax refuses to read."""

import json
import shutil

import pytest

from bertjax.common.errors import UserError
from bertjax.interop import conversion, pretrained
from tests.interop.test_golden import GOLDEN, edit


def test_changed_fields_are_printed(tmp_path, capsys):
    shutil.copytree(GOLDEN, tmp_path / "source")
    edit(tmp_path / "source/config.json", classifier_dropout=0.2, transformers_version="4.1", id2label={"0": "LABEL_0"})
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps({"model_max_length": 99, "do_lower_case": True}))
    conversion.convert(tmp_path / "source", tmp_path / "out", "huggingface")
    lines = capsys.readouterr().out.splitlines()
    positions = pretrained.read_config(GOLDEN).max_position_embeddings
    assert "config.json: classifier_dropout 0.2 is not written" in lines
    assert f"tokenizer_config.json: model_max_length 99 is written as {positions}" in lines
    assert not any(name in line for name in ("version", "id2label", "hidden_size", "lower") for line in lines)


def test_the_maximum_sequence_length_is_kept(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "source")
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps({"model_max_length": 8, "do_lower_case": True}))
    for source, output, to in (("source", "a", "huggingface"), ("source", "b", "bertjax"), ("b", "c", "huggingface")):
        conversion.convert(tmp_path / source, tmp_path / output, to)
        assert pretrained.read_pretrained(tmp_path / output).max_seq_length == 8


def test_an_unreadable_output_folder_is_removed(tmp_path, monkeypatch):
    def refuse(path):
        raise UserError(f"{path}/vocab.txt: wrong")

    monkeypatch.setattr(conversion, "read_tokenizer", refuse)
    with pytest.raises(UserError, match=r"the written checkpoint cannot be read .*vocab.txt: wrong"):
        conversion.convert(GOLDEN, tmp_path / "out", "huggingface")
    assert list((tmp_path / "out").iterdir()) == []

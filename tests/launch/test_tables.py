"""bertjax.train(data=...): tables in memory become files of the workdir."""

import json
import types

import pytest

import bertjax
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.data.corpus.tables import column, read_table
from bertjax.launch.tables import use_tables, write_table

ROWS = [{"text": 'A ship, "at sea"\n…', "label": "sea", "score": 1}, {"text": "Gärten", "label": "garden", "score": 0}]


def frames():
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    polars_frame = types.SimpleNamespace(write_ndjson=lambda path: open(path, "w", encoding="utf-8").write(lines))
    return [ROWS, iter(ROWS), pandas.DataFrame(ROWS), datasets.Dataset.from_list(ROWS), polars_frame]


def test_all_table_types_give_equal_rows(tmp_path):
    for number, table in enumerate(frames()):
        path = tmp_path / f"{number}.jsonl"
        write_table(table, path)
        rows, _ = read_table(path)
        assert [[column(row, name) for name in ROWS[0]] for row in rows] == [
            ["A ship, \"at sea\"\n…", "sea", "1"], ["Gärten", "garden", "0"]
        ]  # fmt: skip


def test_train_reads_the_data_from_the_workdir(monkeypatch, tmp_path):
    configs = []
    monkeypatch.setattr("bertjax.launch.start.launch", lambda config, *_, began, draw, hooks: configs.append(config))
    overrides = {"init_checkpoint": "somewhere"}
    bertjax.train("classify", tmp_path / "one", overrides, data=ROWS)
    bertjax.train("classify", tmp_path / "two", overrides, data={"train": ROWS, "dev": ROWS[:1]})
    bertjax.train("base", tmp_path / "text", data=({"text": text} for text in ("a", "b")))
    one, two, text = configs
    assert one.data.path == str(tmp_path / "one/data/train.jsonl") and two.data.path == str(tmp_path / "two/data")
    assert len(read_table(tmp_path / "two/data/dev.jsonl")[0]) == 1
    assert text.data.corpus == str(tmp_path / "text/data/train.jsonl")


def test_rows_with_nan_and_lone_surrogates_are_readable(tmp_path):
    pandas = pytest.importorskip("pandas")
    row = {"text": "a\ufffd", "number": float("nan"), "label": 1e-12}
    for number, table in enumerate(([row | {"text": "a\ud800"}], pandas.DataFrame([row]))):
        write_table(table, tmp_path / f"{number}.jsonl")
        (read,) = read_table(tmp_path / f"{number}.jsonl")[0]
        assert read.columns == row | {"number": None}


def test_other_rows_do_not_replace_the_data_of_a_run(tmp_path):
    config, path = experiments.load("classify"), tmp_path / "data/train.jsonl"
    use_tables(config, ROWS, tmp_path)
    before = path.read_bytes()
    (tmp_path / "config.json").write_text("{}")
    use_tables(config, iter(ROWS), tmp_path)  # equal rows, as in a resumed run
    for data, message in ((ROWS[:1], "has a run on other rows of train"), ([], "the table train has no rows")):
        with pytest.raises(UserError, match=message):
            use_tables(config, data, tmp_path)
    with pytest.raises(UserError, match="expected a pandas"):
        use_tables(config, {"train": ROWS[:1], "dev": 3}, tmp_path)
    assert path.read_bytes() == before and [file.name for file in path.parent.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize("config, data, message", [
    ("classify", {"dev": ROWS}, r"data = \['dev'\]: expected a table, or a dict with the tables train and dev"),
    ("classify", "rows.csv", r"data = 'rows.csv': expected a pandas or polars DataFrame"),
    ("classify", 3, r"data = 3: expected a pandas"),
    ("classify", [("a", "b")], r"data\[0\] = \('a', 'b'\): expected a dict"),
    ("classify", [{"text": {1}}], r"data\[0\] = .*; use text, numbers and lists"),
    ("base", {"train": ROWS, "dev": ROWS}, "pre-training holds out documents itself"),
])  # fmt: skip
def test_mistakes_raise_errors_of_one_line(config, data, message, tmp_path):
    with pytest.raises(UserError, match=message):
        use_tables(experiments.load(config), data, tmp_path)
    assert not list(tmp_path.glob("data/*.jsonl"))

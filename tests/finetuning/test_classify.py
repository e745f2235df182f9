"""Texts with any number of labels: from tables to predictions, in all checkpoint formats."""

import csv
import dataclasses
import io
import json
import random
import tracemalloc

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config
from bertjax.data.corpus import tables
from bertjax.data.loading.examples import Examples
from bertjax.embedding import datasets
from bertjax.finetuning import conll, metrics, predicted_table, squad_files
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning.label_cells import labels_of
from bertjax.finetuning.task import FineTuning
from bertjax.finetuning.tasks import classify
from bertjax.inference import heads, tasks
from bertjax.inference.losses import CrossEntropy, SigmoidCrossEntropy
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.launch.validate import validate
from bertjax.training.checkpoints.workdir import read_samples
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import TOPICS, one_device_mesh
from tests.finetuning.test_finetuning import quick, run, tokenizer

LABELS = tuple(sorted(TOPICS))


def texts_about(count, seed):
    """Returns (text, topics of the text): rarely several topics, sometimes none."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        topics = rng.sample(LABELS, rng.choice([0, 1, 1, 1, 2]))
        words = [word for topic in topics for word in rng.choices(TOPICS[topic], k=4)]
        rng.shuffle(words)
        rows.append((" ".join(words) or "the", sorted(topics)))
    return rows


def write_table(path, rows):
    """Writes rows of dicts as .jsonl or as .csv."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    file = io.StringIO()
    table = csv.DictWriter(file, rows[0])
    table.writeheader()
    table.writerows(rows)
    path.write_text(file.getvalue())


def write_topics(folder, train=300, dev=60):
    """Writes tables of texts and their topics; returns the rows of the dev set."""
    for name, count, seed in (("train", train, 0), ("dev", dev, 1)):
        rows = texts_about(count, seed)
        write_table(folder / f"{name}.jsonl", [{"text": text, "topics": topics} for text, topics in rows])
    return rows


def config_for(folder, checkpoint="none", **data):
    fields = dict(text="text", second_text="", label="topics", multi_label="list", is_number=False)
    return quick(fine_tuning_config("classify", **fields | data), folder, checkpoint)


@pytest.fixture(scope="module")
def tuned(checkpoint, tmp_path_factory):
    """(folder of the data, workdir of a finished run on it, the rows of the dev set)."""
    folder = tmp_path_factory.mktemp("topics")
    dev = write_topics(folder, train=600)
    config = config_for(folder, checkpoint)
    config.update(dict(packing=True, epochs=12.0))
    run(config, folder / "run")
    return folder, folder / "run", dev


def indicators(texts):
    return [[name in labels for name in LABELS] for labels in texts]


def test_multi_label_training_and_prediction_with_the_threshold_of_the_dev_set(tuned, tmp_path):
    _, workdir, dev = tuned
    source = pretrained.read_pretrained(workdir)
    threshold = source.decided["threshold"]
    assert 0 < threshold < 1 and source.scores["micro_f1"] > 0.9 and source.scores["macro_f1"] > 0.8
    assert f"threshold {threshold:.2f}" in (workdir / "report.txt").read_text()
    assert any(line.get("eval/threshold") == threshold for line in read_metrics(workdir))
    texts = [(text,) for text, _ in dev]
    predictions = list(classify.TASK.predict(source, texts))
    for sample, number in zip(read_samples(workdir), range(0, 60, 6), strict=True):
        assert (sample["text"], sample["label"]) == (dev[number][0], ", ".join(dev[number][1]) or "none")
        assert sample["prediction"] == (", ".join(predictions[number]["labels"]) or "none")
    for prediction in predictions:
        assert prediction["labels"] == [name for name in LABELS if prediction["probabilities"][name] > threshold]
    middle = float(np.median([prediction["probabilities"]["sea"] for prediction in predictions]))
    for prediction in classify.TASK.predict(dataclasses.replace(source, decided={"threshold": middle}), texts):
        assert prediction["labels"] == [name for name in LABELS if prediction["probabilities"][name] > middle]
    sides = (topics for _, topics in dev), (prediction["labels"] for prediction in predictions)
    assert metrics.f1_of_labels(*map(indicators, sides)) == pytest.approx(source.scores)

    # The native format stores the threshold; other formats use 0.5.
    conversion.convert(workdir, tmp_path / "ours", "bertjax")
    assert list(classify.TASK.predict(pretrained.read_pretrained(tmp_path / "ours"), texts)) == predictions
    line = conversion.convert(workdir, tmp_path / "theirs", "huggingface")
    assert f"cannot store them: threshold = {threshold:.4g}" in line
    fields = json.loads((tmp_path / "theirs/config.json").read_text())
    assert fields["problem_type"] == "multi_label_classification" and tuple(fields["id2label"].values()) == LABELS
    assert huggingface.read_head(tmp_path / "theirs/config.json")[2] == "multi_label_classification"
    for one, other in zip(classify.TASK.predict(pretrained.read_pretrained(tmp_path / "theirs"), texts), predictions):
        assert one["probabilities"] == other["probabilities"]
        assert one["labels"] == [name for name in LABELS if one["probabilities"][name] > 0.5]


@pytest.mark.parametrize("suffix, written, cells", [
    ("jsonl", "list", [["sea", "law"], [], ["law"]]),
    ("jsonl", "list", [[2, 17], [], [17]]),
    ("csv", "list", ["['sea', 'law']", "", '["law"]']),
    ("csv", "|", ["sea| law", "", "law"]),
    ("jsonl", ", ", ["sea, law", " ", "law"]),
])  # fmt: skip
def test_labels_are_read_in_common_notations(tmp_path, suffix, written, cells):
    for name in ("train", "dev"):
        write_table(tmp_path / f"{name}.{suffix}", [{"text": "ship", "topics": cell} for cell in cells])
    dataset = classify.TASK.load(config_for(tmp_path, multi_label=written), tokenizer())
    assert dataset.labels in (("law", "sea"), ("17", "2"))
    assert dataset.train.labels.tolist() == [[1, 1], [0, 0], [1, 0]]
    first, second = dataset.labels
    assert f"3 training examples: 2 {first}, 1 {second}; 1 without a label" in dataset.notes
    # with both labels for every text: 3 of 6 are right, all 3 true labels are predicted
    assert dataset.baseline == pytest.approx(2 / 3)


def test_summaries_count_rows_and_tokens(tmp_path):
    """Tagged sentences, questions and embedding data have the same summary as classified texts."""
    texts = ["ship sail harbour wave ship sail", "ship", "qqq", "\u200b"]
    for name in ("train", "dev"):
        write_table(tmp_path / f"{name}.jsonl", [{"text": t, "topics": "ab"[i % 2]} for i, t in enumerate(texts)])
    config = config_for(tmp_path, multi_label="", windows="", doc_stride=2)
    config.max_seq_length = 6
    notes = classify.TASK.load(config, tokenizer()).notes
    assert notes[0] == "training: 4 examples found = 4 used, 0 skipped; 6 tokens, 16.67% of them unknown"
    assert notes[1].startswith("1 of 4 training examples truncated to 6 tokens: 25.00% of the tokens are cut, 2 of ")
    assert "--config.data.windows=mean" in notes[1]
    assert notes[2] == "1 of 4 training examples are empty: they have no token"
    assert notes[3].startswith("warning: 16.7% of the tokens of the training examples are unknown to the vocabulary")
    config.data.windows = "mean"
    assert not any("truncated" in note for note in classify.TASK.load(config, tokenizer()).notes)
    (tmp_path / "train.txt").write_text("\n".join(["", *texts[:3]]))
    sentences = datasets.PAIRS | dict(path=f"{tmp_path}/train.txt", form="sentences")
    text_set = datasets.read_set(datasets.FlagSource("", **sentences))
    assert len(text_set.texts) == 3 and text_set.skipped == {"empty": 1}


def test_one_column_per_label(tmp_path):
    rows = [("1", 0, "False", 0), (0, 1, "true", 0), ("1.0", 0, "0", 0)]
    names = ("sea", "a,b", "law", "rare")
    for name in ("train", "dev"):
        write_table(tmp_path / f"{name}.csv", [{"text": "ship", **dict(zip(names, row))} for row in rows])
    config = config_for(tmp_path, label=r"sea,law,a\,b,rare", multi_label="")
    dataset = classify.TASK.load(config, tokenizer())
    assert dataset.labels == ("sea", "law", "a,b", "rare")  # no text has the last label
    assert dataset.train.labels.tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0]]
    scores = dataset.dev[0].score(np.array([[3.0, -3.0, -3.0, -9.0]] * 3))
    assert scores["macro_f1"] == pytest.approx((0.8 + 0.5 + 0.5 + 0) / 4)
    config.data.label = r"a\,b"  # one column, with two classes
    assert classify.TASK.load(config, tokenizer()).labels == ("0", "1")
    config.data.label = "sea,earth"
    with pytest.raises(
        UserError, match=r"train.csv:2: no column 'earth'; choose --config.data.label from text, sea, a,b, law, rare"
    ):
        classify.TASK.load(config, tokenizer())


@pytest.mark.parametrize("suffix, written, cell, message", [
    ("jsonl", "list", None, r"train.jsonl:1: topics is null, expected a list of labels; write \[\] for a text"),
    ("jsonl", "list", {"sea": 1}, r"topics is an object, expected a list"),
    ("jsonl", "list", [["sea"]], r"topics is a list, expected text"),
    ("jsonl", "list", [1, 0, 1], r"topics has '1' twice, .* in config.data.label,"),
    ("jsonl", "list", ["nan"], r"topics is 'nan', which is a missing value"),
    ("jsonl", "list", ["law", "law\ufeff"], r"train.jsonl:1: topics is 'law.+ufeff', but 'law' at"),
    ("csv", "list", "sea|law", r"train.csv:2: topics is 'sea|law', expected a list .* set config.data.multi_label"),
    ("csv", "list", "['sea' 'law']", r"expected a list such as"),
    ("csv", "|", "['sea', 'law']", r"topics is a list, .* set config.data.multi_label=list"),
    ("csv", "", "2", r"train.csv:2: topics is '2', expected 0 or 1"),
    ("csv", "", "", r"topics is empty; remove rows without a label"),
])  # fmt: skip
def test_invalid_label_lists_are_refused(tmp_path, suffix, written, cell, message):
    law, sea = {"jsonl": (["law"], ["sea"]), "csv": ("['law']", "['sea']")}[suffix] if written == "list" else "01"
    for name in ("train", "dev"):
        rows = [{"text": "ship", "other": "1", "topics": topics} for topics in (cell, law, sea)]
        write_table(tmp_path / f"{name}.{suffix}", rows)
    data = dict(multi_label=written) if written else dict(multi_label="", label="topics,other")
    with pytest.raises(UserError, match=message):
        classify.TASK.load(config_for(tmp_path, **data), tokenizer())


@pytest.mark.parametrize("fields, message", [
    (dict(label="a,b"), r"config.data.multi_label = 'list': is for one column .* leave the field out"),
    (dict(is_number=True), r"config.data.is_number = True: a regression has one column with a number"),
    (dict(label="a,b", is_number=True, multi_label=""), r"config.data.is_number = True"),
    (dict(label="a,b,a", multi_label=""), r"config.data.label = 'a,b,a': must name each column once"),
    (dict(windows="sum", doc_stride=4), r"config.data.windows = 'sum': choose mean or max of the windows' logits"),
    (dict(windows="max", doc_stride=0), r"config.data.doc_stride = 0: must be at least 1"),
])  # fmt: skip
def test_invalid_settings_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        validate(config_for("folder", **fields))


# Tables with one label per text; numbers.


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    path = str(tmp_path / "nowhere")
    for find in (
        lambda: tables.find_table(path, "train"),
        lambda: squad_files.find_squad_file(path, "train", "v1.1"),
        lambda: conll.find_conll_file(path, "train"),
    ):
        with pytest.raises(UserError, match=f"^config.data.path = '{path}': no such file or folder; correct the path$"):
            find()


def test_user_tables_are_read(tmp_path):
    config = config_for(tmp_path, text="a", second_text="b", label="same", multi_label="")
    (tmp_path / "train.csv").write_text('a,b,same\n"ship, sail",wave,yes\nrose,judge,no\n')
    (tmp_path / "dev.csv").write_text('a,b,same\nship,"oven\nbread",no\n')
    dataset = classify.TASK.load(config, tokenizer())
    assert dataset.labels == ("no", "yes") and dataset.train.labels.tolist() == [1, 0]
    assert dataset.dev[0].score(np.array([[1.0, 0.0]])) == {"accuracy": 1.0, "macro_f1": 1.0}
    for cell, message in (("maybe", "unknown label 'maybe'; expected one of no, yes"), ("", "same is empty; remove")):
        (tmp_path / "dev.csv").write_text(f"a,b,same\nship,oven,{cell}\n")
        with pytest.raises(UserError, match="dev.csv:2: " + message):
            classify.TASK.load(config, tokenizer())
    (tmp_path / "dev.csv").unlink()
    with pytest.raises(UserError, match=r"the folder has no dev.csv, dev.tsv or dev.jsonl"):
        classify.TASK.load(config, tokenizer())
    (tmp_path / "train.csv").unlink()
    for name in ("train", "dev"):
        write_table(tmp_path / f"{name}.jsonl", [dict(a="ship", b="sail", same=1), dict(a="ship", b="oven", same=0)])
    config.data.is_number = True
    dataset = classify.TASK.load(config, tokenizer())
    assert dataset.labels == () and dataset.train.labels.dtype == float and dataset.metric == "spearman"
    (tmp_path / "dev.jsonl").write_text(json.dumps({"a": None, "b": "ship", "same": 1}) + "\n")
    with pytest.raises(UserError, match=r"dev.jsonl:1: a is null"):
        classify.TASK.load(config, tokenizer())


def labelled(folder, rows, suffix="jsonl", dev=None, **fields):
    """Returns the data of `classify` with these (text, label) pairs in both files."""
    for name, content in (("train", rows), ("dev", dev or rows)):
        write_table(folder / f"{name}.{suffix}", [{"text": text, "label": label} for text, label in content])
    return classify.TASK.load(config_for(folder, label="label", multi_label="", **fields), tokenizer())


def test_labels_with_two_spellings_are_merged_or_refused(tmp_path):
    assert labelled(tmp_path, [("ship", "pos"), ("rose", "neg "), ("oven", " pos")]).labels == ("neg", "pos")
    assert labelled(tmp_path, [("ship", 1), ("rose", 0.0), ("oven", 1.0), ("net", "1")]).labels == ("0", "1")
    assert labelled(tmp_path, [("ship", True), ("rose", False)]).labels == ("false", "true")
    assert labelled(tmp_path, [("ship", "[OTHER]"), ("rose", "(a)")]).labels == ("(a)", "[OTHER]")
    for one, other, message in (
        ("1.0", "1", r"train.jsonl:2: label is '1', but '1.0' at .*train.jsonl:1; use one spelling"),
        (True, 1, r"train.jsonl:2: label is '1', but 'true'"),
        ("True", True, r"but 'True'"),
        ("caf\u00e9", "cafe\u0301", r"train.jsonl:2: label is"),
        ("pos", "pos\ufeff", r"train.jsonl:2: label is"),
    ):
        with pytest.raises(UserError, match=message):
            labelled(tmp_path, [("ship", one), ("rose", other)])
    scores = [("ship", f"{number / 8}") for number in range(20)]
    with pytest.raises(UserError, match=r"config.data.is_number = False: label has 20 different numbers, such as 0.1"):
        labelled(tmp_path, scores)
    with pytest.raises(UserError, match=r"dev.jsonl:1: unknown label 'no'; expected one of a, .*, l and 8 more labels"):
        labelled(tmp_path, [("ship", letter) for letter in "abcdefghijklmnopqrst"], dev=[("ship", "no")])


@pytest.mark.parametrize("label, message", [
    (["toxic", "insult"], r"train.jsonl:2: label is a list, .* set config.data.multi_label=list"),
    ({"toxic": 1}, r"label is an object"),
    ("['toxic', 'insult']", r"label is a list"),
    (None, r"train.jsonl:2: label is null; remove rows without a label"),
    ("  ", r"label is empty"),
    ("nan", r"label is 'nan', which is a missing value"),
])  # fmt: skip
def test_unknown_labels_are_refused(tmp_path, label, message):
    for suffix in ("jsonl", "csv") if isinstance(label, str) else ("jsonl",):
        (tmp_path / suffix).mkdir()
        with pytest.raises(UserError, match=message):
            labelled(tmp_path / suffix, [("ship", "a"), ("rose", label), ("oven", "b")], suffix)


@pytest.mark.parametrize("label", ["nan", "Infinity", "1_000", "1e39", "1,5", True, "much"])
def test_invalid_numbers_are_refused(tmp_path, label):
    with pytest.raises(UserError, match=r"train.jsonl:2: label is '.*', expected a number"):
        labelled(tmp_path, [("ship", 1), ("rose", label)], is_number=True)
    dataset = labelled(tmp_path, [("ship", 1), ("rose", " -2.5e-1 ")], is_number=True)
    assert dataset.train.labels.tolist() == [1, -0.25]


def test_dev_texts_that_occur_in_the_training_data_are_counted(tmp_path):
    rows = [("ship", "a"), ("rose", "b"), ("oven", "a")]
    notes = labelled(tmp_path, rows, dev=[("rose", "a"), ("net", "b"), ("ship", "a")]).notes
    assert "2 of 3 dev texts are also in the training data" in notes
    assert not any("also in" in note for note in labelled(tmp_path, rows, dev=[("net", "a")]).notes)


# Weights of the classes.


def test_invalid_class_weights_are_refused(tuned, checkpoint):
    config = config_for(tuned[0], checkpoint)
    config, _ = finetuning_run.resolve(config, None)
    dataset = classify.TASK.load(config, tokenizer())

    def task_of(dataset=dataset, **head):
        config.head.update(dict(class_weights="", label_smoothing=0.0), **head)
        return FineTuning(config, one_device_mesh(config), dataset)

    assert task_of(class_weights="sea=2").loss.label_loss.weights == (1, 1, 1, 2)
    labels = np.array(dataset.train.labels)
    assert task_of(class_weights="balanced").loss.label_loss.weights == pytest.approx(
        (1 - labels).sum(0) / labels.sum(0)
    )
    for text, message in (
        ("earth=2", r" = 'earth=2': 'earth' is not a label of the training data; choose from court,"),
        ("sea", r" = 'sea': write LABEL=WEIGHT,\.\.\., with weights of at least 0"),
        ("sea=-1", r" = .*with weights of at least 0"),
        ("court=0,garden=0,kitchen=0,sea=0", r" = .*at least one weight must be above 0"),
    ):
        with pytest.raises(UserError, match="config.head.class_weights" + message):
            task_of(class_weights=text)
    with pytest.raises(
        UserError, match=r"config.head.label_smoothing = 0.1: must be 0 if a text can have several labels"
    ):
        task_of(label_smoothing=0.1)
    numbers = dataclasses.replace(dataset, head=heads.RegressionHead(), labels=())
    with pytest.raises(UserError, match=r"config.head.class_weights = 'balanced': this task predicts no classes"):
        task_of(numbers, class_weights="balanced")
    config.head.label_smoothing = 1.0
    with pytest.raises(UserError, match=r"config.head.label_smoothing = 1.0: must be at least 0 and below 1"):
        validate(config)


def test_absent_classes_have_weight_one():
    ids, types, tags = [np.arange(3)] * 2, [np.zeros(3)] * 2, [np.array([-1, 0, 2]), np.array([0, 0, -1])]
    examples = Examples(ids, types, tags, per_token=True)
    assert CrossEntropy.balanced(examples, 4).tolist() == [4 / (2 * 3), 1, 4 / 2, 1]
    examples = Examples(ids, types, np.array([[1, 0, 1], [1, 0, 0]]))
    assert SigmoidCrossEntropy.balanced(examples, 3).tolist() == [1, 1, 1]
    nothing = {"labels": np.zeros(2, int), "weights": np.ones(2)}  # a batch of a class with weight 0
    assert CrossEntropy((0.0, 1.0)).prediction_weights(nothing).sum() == 0


# Tables of texts to predict.


@pytest.mark.slow
def test_predicted_tables_have_columns_of_predictions(tuned, tmp_path, monkeypatch):
    """Predictions keep the order of the rows, in chunks, and equal the predictions of the texts alone."""
    monkeypatch.setattr(predicted_table, "ROWS_AT_ONCE", 7)
    _, workdir, dev = tuned
    source = pretrained.read_pretrained(workdir)
    rows = [{"id": i, "text": f"{text},\n", "note": '"'} for i, (text, _) in enumerate(dev)]
    rows[3]["text"] += " ".join(["ship"] * 40)
    expected = list(classify.TASK.predict(source, [(row["text"],) for row in rows]))
    for suffix in (".csv", ".jsonl"):
        write_table(tmp_path / f"texts{suffix}", rows)
    assert predicted_table.text_columns(classify.TASK, source, "", "") == ("text",)  # the column of the run
    for source_suffix, suffix in ((".csv", ".tsv"), (".jsonl", ".csv"), (".csv", ".jsonl")):
        output = tmp_path / f"out{suffix}"
        printed = predicted_table.write_predictions(output, source, tmp_path / f"texts{source_suffix}")
        assert printed == f"60 predictions in {output}, 1 of them for texts truncated to 32 tokens"
        rows_read, _ = tables.read_table(output)
        assert [str(row.columns["id"]) for row in rows_read] == [str(row["id"]) for row in rows]
        for i, (row, one) in enumerate(zip(rows_read, expected)):
            if suffix == ".jsonl":
                predicted = row.columns["predicted"]
                assert predicted["labels"] == one["labels"] and ("cut" in predicted) == (i == 3)
            else:  # the written cells can be read as labels again
                assert labels_of(row, "predicted.labels", "list") == one["labels"]
                chance = float(row.columns["predicted.probabilities.sea"])
                assert chance == pytest.approx(one["probabilities"]["sea"], abs=1e-5)
    with pytest.raises(UserError, match=r"out.tsv:2: the table has a column 'predicted.labels'"):
        predicted_table.write_predictions(tmp_path / "again.csv", source, tmp_path / "out.tsv")
    assert not list(tmp_path.glob("again*")), "a partial table stays"


def test_text_columns_are_read_from_the_run_or_from_flags(tuned):
    source = pretrained.read_pretrained(tuned[1])
    other = dataclasses.replace(source, settings=type(source.settings)())  # of another format
    names = [
        predicted_table.text_columns(classify.TASK, *arguments) for arguments in ((other, "", ""), (source, "a", "b"))
    ]
    assert names == [("text",), ("a", "b")]
    with pytest.raises(UserError, match=r"--second_text=b: name the column of the first text as well"):
        predicted_table.text_columns(classify.TASK, source, "", "b")
    with pytest.raises(UserError, match=r'--text=text: this checkpoint expects "question \|\|\| paragraph"; name'):
        predicted_table.text_columns(tasks.get("squad"), other, "", "")


def test_predictions_with_varying_fields_need_json_lines(tmp_path):
    with open(tmp_path / "out.csv", "w") as file:
        writer = tables.TableWriter(tmp_path / "out.csv", file)
        writer.write({"a": 1, "b": None}, "x:1")
        writer.write({"a": [1, "é"]}, "x:2")
        writer.write({"a": "x\ry"}, "x:2")
        with pytest.raises(UserError, match=r"x:3: earlier rows have no column 'c'; write a .jsonl"):
            writer.write({"c": 1}, "x:3")
    assert (tmp_path / "out.csv").read_bytes().decode() == 'a,b\n1,\n"[1, ""é""]",\n"x\ry",""\n'


@pytest.mark.parametrize("suffix, ends", [("csv", "\r\n"), ("csv", "\r"), ("tsv", "\n"), ("jsonl", "\n")])
def test_streamed_rows_equal_the_rows_of_the_whole_table(tmp_path, suffix, ends):
    path, rows = tmp_path / f"table.{suffix}", [{"text": 'a "b', "n": "1"}, {"text": "c", "n": "2"}]
    sign = "\t" if suffix == "tsv" else ","
    lines = [f"text{sign}n", f'"a ""b"{sign}1', "", f"c{sign}2"] if suffix != "jsonl" else map(json.dumps, rows)
    text = ends.join(lines)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [row.columns for row in tables.rows_of(path)] == rows
    assert list(tables.rows_of(path)) == list(tables.read_table(path)[0])
    path.write_bytes(text.replace("\r", "\n").encode() + b"\n\xff")
    with pytest.raises(UserError, match=rf"table.{suffix}:\d: not UTF-8 \(invalid start byte at byte 0\)"):
        list(tables.rows_of(path))
    path.write_text("")
    with pytest.raises(UserError, match="has no example"):
        list(tables.rows_of(path))


def test_a_large_table_is_read_in_constant_memory(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_text("text\tn\n" + 'a "long" text\t1\n' * 20_000)
    tracemalloc.start()
    assert sum(1 for _ in tables.rows_of(path)) == 20_000
    assert tracemalloc.get_traced_memory()[1] < 2e5 < path.stat().st_size
    tracemalloc.stop()


# Labelled files, scored without training.


def test_a_labelled_file_is_scored_like_the_dev_set(tuned, tmp_path):
    folder, workdir, dev = tuned
    source = pretrained.read_pretrained(workdir)
    scores = finetuning_run.score(source, classify.TASK.read_labelled(source, folder / "dev.jsonl"))
    assert scores.scores == pytest.approx(source.scores) and scores.decided == source.decided
    # The threshold of the dev set stays, even if another threshold is better for these texts.
    predictions = list(classify.TASK.predict(source, [(text,) for text, _ in dev]))
    likely = [chance for prediction in predictions for chance in prediction["probabilities"].values() if chance > 0.5]
    odd = [
        [name for name in LABELS if prediction["probabilities"][name] > np.median(likely)] for prediction in predictions
    ]
    write_table(tmp_path / "odd.jsonl", [{"text": text, "topics": topics} for (text, _), topics in zip(dev, odd)])
    expected = metrics.f1_of_labels(indicators(odd), indicators(prediction["labels"] for prediction in predictions))
    scores = finetuning_run.score(source, classify.TASK.read_labelled(source, tmp_path / "odd.jsonl"))
    assert scores.scores == pytest.approx(expected) and scores.scores["micro_f1"] < 0.9
    for rows, message in (
        ([{"text": "ship", "topics": ["earth"]}], r"odd.jsonl:1: unknown label 'earth'; expected one of court, garden"),
        ([{"text": "ship"}], r"odd.jsonl:1: no column 'topics'; the columns are text"),
    ):
        write_table(tmp_path / "odd.jsonl", rows)
        with pytest.raises(UserError, match=message):
            classify.TASK.read_labelled(source, tmp_path / "odd.jsonl")

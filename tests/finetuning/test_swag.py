"""Multiple choice: a tiny run is trained, and its export gives equal choices."""

import random

import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config
from bertjax.finetuning.tasks import swag
from bertjax.interop import conversion, pretrained
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import TOPICS
from tests.finetuning.test_classify import write_table
from tests.finetuning.test_finetuning import quick, run


def write(path, count, seed, label=None):
    """Writes and returns the rows.

    The right ending has the topic of the sentence, the other endings have another topic.
    """
    rng, rows = random.Random(seed), []
    for _ in range(count):
        topic, other = rng.sample(sorted(TOPICS), 2)
        right = rng.randrange(4)
        row = {"sent1": " ".join(rng.choices(TOPICS[topic], k=5)), "sent2": rng.choice(TOPICS[topic])}
        for i, name in enumerate(swag.ENDINGS):
            row[name] = " ".join(rng.choices(TOPICS[topic if i == right else other], k=4))
        rows.append(row | {"label": right if label is None else label})
    write_table(path, rows)
    return rows


def config_for(folder, checkpoint):
    return quick(fine_tuning_config("swag"), folder, checkpoint, epochs=6.0)


def test_a_tiny_run_trains_multiple_choice(checkpoint, tmp_path):
    write(tmp_path / "train.csv", 300, 0)
    rows = write(tmp_path / "val.csv", 40, 1)
    run(config_for(tmp_path, checkpoint), tmp_path / "run")
    accuracy = read_metrics(tmp_path / "run")[-2]["eval/accuracy"]
    assert accuracy > 0.5
    conversion.convert(tmp_path / "run", tmp_path / "hf", "huggingface")
    source = pretrained.read_pretrained(tmp_path / "hf")
    assert source.architecture == "BertForMultipleChoice"
    texts = [(row["sent1"], *(f"{row['sent2']} {row[name]}" for name in swag.ENDINGS)) for row in rows]
    results = list(swag.TASK.predict(source, texts))
    right = [result["choice"] == row["label"] for result, row in zip(results, rows)]
    assert sum(right) / len(right) == pytest.approx(accuracy)
    assert all(sum(result["probabilities"]) == pytest.approx(1) for result in results)


def test_mistakes_are_named(checkpoint, tmp_path):
    write(tmp_path / "train.csv", 3, 0, label="4")
    source = pretrained.read_pretrained(checkpoint)
    with pytest.raises(UserError, match=r"train.csv:2: unknown label '4'; expected one of 0, 1, 2, 3"):
        swag.TASK.load(config_for(tmp_path, checkpoint), source.tokenizer)
    (tmp_path / "train.csv").write_text("sent1,label\nship,1\n")
    with pytest.raises(UserError, match=r"train.csv:2: no column 'sent2'; the columns are sent1, label"):
        swag.TASK.load(config_for(tmp_path, checkpoint), source.tokenizer)
    (tmp_path / "train.csv").unlink()
    with pytest.raises(UserError, match=r"the folder has no train.csv"):
        swag.TASK.load(config_for(tmp_path, checkpoint), source.tokenizer)

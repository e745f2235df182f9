"""A choice among endings: a tiny run learns which, and says it again from its export."""

import csv
import random

import pytest

from bertjax.config import UserError, fine_tuning_config
from bertjax.interop import conversion, pretrained
from bertjax.tasks import swag, validate
from bertjax.tasks.launch import launch
from bertjax.training.sinks.jsonl import read_metrics
from tests.conftest import TOPICS
from tests.tasks.test_finetuning import quick

pytestmark = pytest.mark.usefixtures("on_one_device")


def write(path, count, seed, label=None):
    """The right ending is of the sentence's topic, the others are of another."""
    rng = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "sent1", "sent2", *swag.ENDINGS, "label"])
        for number in range(count):
            topic, other = rng.sample(sorted(TOPICS), 2)
            right = rng.randrange(4)
            endings = [" ".join(rng.choices(TOPICS[topic if i == right else other], k=4)) for i in range(4)]
            sentence = " ".join(rng.choices(TOPICS[topic], k=5))
            writer.writerow([number, sentence, rng.choice(TOPICS[topic]), *endings, right if label is None else label])


def config_for(folder, checkpoint):
    config = quick(fine_tuning_config("swag"), folder, checkpoint, epochs=6.0)
    validate(config)
    return config


def test_a_tiny_run_learns_to_choose(checkpoint, tmp_path):
    write(tmp_path / "train.csv", 300, 0)
    write(tmp_path / "val.csv", 40, 1)
    launch(config_for(tmp_path, checkpoint), tmp_path / "run")
    accuracy = read_metrics(tmp_path / "run")[-2]["eval/accuracy"]
    assert accuracy > 0.5
    conversion.convert(tmp_path / "run", tmp_path / "hf", "huggingface")
    source = pretrained.read(tmp_path / "hf")
    assert source.architecture == "BertForMultipleChoice"
    with (tmp_path / "val.csv").open() as file:
        rows = list(csv.DictReader(file))
    texts = [(row["sent1"], *(f"{row['sent2']} {row[name]}" for name in swag.ENDINGS)) for row in rows]
    results = list(swag.predict(source, texts))
    right = [result["choice"] == int(row["label"]) for result, row in zip(results, rows)]
    assert sum(right) / len(right) == pytest.approx(accuracy)
    assert all(sum(result["probabilities"]) == pytest.approx(1) for result in results)


def test_mistakes(checkpoint, tmp_path):
    write(tmp_path / "train.csv", 3, 0, label="4")
    source = pretrained.read(checkpoint)
    with pytest.raises(UserError, match=r"train.csv:2: unknown label '4'; expected one of 0, 1, 2, 3"):
        swag.load(config_for(tmp_path, checkpoint), source.tokenizer)
    (tmp_path / "train.csv").write_text("sent1,label\nship,1\n")
    with pytest.raises(UserError, match=r"train.csv:2: no column 'sent2'; there are sent1, label"):
        swag.load(config_for(tmp_path, checkpoint), source.tokenizer)
    (tmp_path / "train.csv").unlink()
    with pytest.raises(UserError, match=r"no train.csv in it"):
        swag.load(config_for(tmp_path, checkpoint), source.tokenizer)

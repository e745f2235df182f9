"""The model card that `convert` writes for Hugging Face describes the run."""

import dataclasses
import json

import pytest
import safetensors.numpy
import yaml

from bertjax.config.defaults import fine_tuning_config, pretraining_config
from bertjax.config.experiments import load
from bertjax.interop import conversion, pretrained
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import RunInfo, write_info
from bertjax.training.scores import Scores
from tests.interop.test_golden import GOLDEN


def made_run(folder, config, scores, architecture="", labels=None, step=0):
    """A run with the weights of tests/golden/bert."""
    golden = pretrained.read_pretrained(GOLDEN)
    config = config.unlock()
    config.model.update(dataclasses.asdict(golden.config))
    checkpoint.write_params(folder, golden.params)
    (folder / "checkpoints/0").rename(folder / f"checkpoints/{step}")
    write_info(folder, RunInfo(config.lock(), architecture, labels), golden.tokenizer)
    checkpoint.write_scores(folder, step, Scores(scores))
    return folder


def read_card(folder):
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and line != "| | |"]
    return yaml.safe_load(metadata), dict(row for row in rows if len(row) == 2), text


def test_the_card_of_a_pretrained_model(tmp_path):
    config = pretraining_config()
    config.data.update(corpus=f"{tmp_path}/a.txt,x/b.txt", language="is", do_whole_word_mask=True)
    config.data.mixture = f"{tmp_path}/a.txt=2,x/b.txt=1"
    config.data.cleaning.min_words = 20
    config.batch_size, config.packing = 48, True
    run = made_run(tmp_path / "run", config, {"mlm_loss": 2.5, "mlm_accuracy": None})
    conversion.convert(run, tmp_path / "icelandic", "huggingface", license_name="apache-2.0")
    metadata, rows, text = read_card(tmp_path / "icelandic")
    assert metadata == {
        "license": "apache-2.0", "language": "is", "library_name": "transformers", "pipeline_tag": "fill-mask",
        "tags": ["bert", "bertjax"],
    }  # fmt: skip
    expected = {
        "batch_size": "48", "steps of length 512": "100,000", "mlm_loss": "2.5", "corpus": "a.txt, b.txt",
        "masked_lm_split": "(0.8, 0.1, 0.1)", "mixture": "a.txt=2,b.txt=1", "do_whole_word_mask": "True",
        "packing": "True", "cleaning.min_words": "20", "optimizer.bias_correction": "False",
        "optimizer.max_grad_norm": "1.0",
    }  # fmt: skip
    assert expected.items() <= rows.items() and not rows.keys() & {"cleaning.nfc", "do_span_mask"}
    assert "# icelandic\n" in text and 'pipeline("fill-mask", model="icelandic")' in text and "[MASK]" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    "step, short, long",
    [(905_000, "900,000", "5,000 of 100,000"), (40_000, "40,000 of 900,000", "0 of 100,000"),
     (1_000_000, "900,000", "100,000")],
)  # fmt: skip
def test_the_card_states_the_number_of_completed_steps(tmp_path, step, short, long):
    run = made_run(tmp_path / "run", pretraining_config(), {}, step=step)
    conversion.convert(f"{run}@{step}", tmp_path / "out", "huggingface")
    _, rows, _ = read_card(tmp_path / "out")
    assert (rows["steps of length 128"], rows["steps of length 512"]) == (short, long)


def test_the_card_describes_the_corpus_from_the_manifest(records_folder, tmp_path):
    """The manifest describes the corpus; a damaged manifest is an error."""
    config, records = pretraining_config(), tmp_path / "records"
    config.data.records = str(records)
    records.mkdir()
    run = made_run(tmp_path / "run", config, {})
    manifest = json.loads((records_folder / "manifest.json").read_text())
    odd = {"recipe": manifest["recipe"] | {"corpus": 5}}
    documents = str(manifest["corpus"]["train_documents"])
    for number, (changed, corpus, count) in enumerate((
        ({}, ", ".join(path.rpartition("/")[2] for path in manifest["recipe"]["corpus"]), documents),
        (odd | {"corpus": {}}, "5", None),
        (odd | {"corpus": {"train_documents": 3}}, "5", "3"),
    )):  # fmt: skip
        (records / "manifest.json").write_text(json.dumps(manifest | changed))
        conversion.convert(run, tmp_path / f"out-{number}", "huggingface")
        _, rows, text = read_card(tmp_path / f"out-{number}")
        assert rows["corpus"] == corpus and rows.get("training documents") == count and "## Scores" not in text
    (records / "manifest.json").write_text("{")
    with pytest.raises(pretrained.UserError, match=r"manifest.json: damaged"):
        conversion.convert(run, tmp_path / "again", "huggingface")
    assert int(documents) > 50 and not (tmp_path / "again").exists()


def test_the_card_of_a_fine_tuned_model(tmp_path):
    config = fine_tuning_config("glue", name="mrpc").unlock()
    config.update(epochs=2.0, init_checkpoint="some/where")
    config.data.path = str(tmp_path / "GLUE")
    config.freeze_layers, config.head.class_weights, config.lora.rank = 1, "balanced", 8
    run = made_run(tmp_path / "run", config, {"f1": 0.91234}, "BertForMaskedLM", ("no", "yes"))
    checkpoint.write_scores(run, 0, Scores({"f1": 0.91234}, decided={"threshold": 0.4}))
    conversion.convert(run, tmp_path / "out", "huggingface")
    metadata, rows, _ = read_card(tmp_path / "out")
    assert metadata["license"] == "unknown" and "language" not in metadata
    expected = {
        "data": "GLUE", "epochs": "2.0", "init_checkpoint": "where", "f1": "0.9123", "freeze_layers": "1",
        "head.class_weights": "balanced", "lora.rank": "8", "threshold": "0.4",
    }  # fmt: skip
    assert expected.items() <= rows.items()
    assert not rows.keys() & {"keep_layers", "head.label_smoothing", "lora.alpha", "distill.teacher"}


@pytest.mark.parametrize("teacher", ["", "runs/teacher"])
def test_distillation_is_listed_if_there_is_a_teacher(tmp_path, teacher):
    config = load("embed").unlock()
    config.distill.teacher = teacher
    conversion.convert(made_run(tmp_path / "run", config, {}), tmp_path / "out", "huggingface", "BertModel")
    _, rows, _ = read_card(tmp_path / "out")
    expected = {"distill.teacher": "teacher", "distill.what": "vectors"} if teacher else {}
    assert {name: value for name, value in rows.items() if name.startswith("distill.")} == expected


def test_other_formats_and_checkpoints_of_unknown_origin_have_no_card(tmp_path):
    run = made_run(tmp_path / "run", pretraining_config(), {})
    for source, target, form in ((run, "tf1", "tf1"), (run, "ours", "bertjax"), (GOLDEN, "theirs", "bertjax"),
                                 (tmp_path / "theirs", "back", "huggingface")):  # fmt: skip
        conversion.convert(source, tmp_path / target, form)
        assert not (tmp_path / target / "README.md").exists()


def test_the_card_of_an_encoder_has_no_scores_of_removed_heads(tmp_path):
    config = fine_tuning_config("glue", name="mrpc")
    run = made_run(tmp_path / "run", config, {"f1": 0.9}, "BertForMaskedLM", ("no", "yes"))
    printed = conversion.convert(run, tmp_path / "out", "huggingface", "BertModel")
    metadata, rows, text = read_card(tmp_path / "out")
    assert metadata["pipeline_tag"] == "feature-extraction" and "f1" not in rows and "masked_lm" not in printed
    assert "the encoder of a model that was trained for the task `glue`" in text
    written = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert f"with {sum(x.size for x in written.values()):,} parameters" in text

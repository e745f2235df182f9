"""The stored info about a run, and the fields that two runs in a workdir must share."""

import json

import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config
from bertjax.text import tokenizer
from bertjax.training.checkpoints import checkpoint, workdir
from bertjax.training.checkpoints.workdir import RunInfo
from bertjax.training.scores import Scores
from tests.conftest import tiny_config


def pieces(*words, lowercase=True):
    return tokenizer.WordPiece([*tokenizer.SPECIAL_TOKENS, *words], lowercase=lowercase)


def test_run_info_round_trips(tmp_path):
    config = fine_tuning_config("squad", version="v2.0", doc_stride=16)
    config.optimizer.learning_rate = 3e-5
    info = RunInfo(config, "BertForQuestionAnswering", ("a", "b"), workdir.tokenizer_entry(pieces("ship")), 42)
    workdir.write_info(tmp_path, info, pieces("ship"))
    again = workdir.require_info(tmp_path)
    assert again == info and again.config.data.doc_stride == 16 and again.config.is_locked
    assert workdir.differences(info, again) == []


def test_the_tokenizer_of_the_run_is_loaded(tmp_path):
    """The tokenizer of the run is loaded even if the config, which has no tokenizer path, has another setting."""
    cased, config = pieces("Paris", "paris", lowercase=False), tiny_config("text.txt")
    assert config.tokenizer.lowercase
    workdir.write_info(tmp_path, RunInfo(config), cased)
    assert workdir.tokenizer_of_run(tmp_path, workdir.require_info(tmp_path)).encode("Paris").ids == [5]


def test_differences_have_field_and_both_values(tmp_path):
    before, config = RunInfo(tiny_config("text.txt")), tiny_config("text.txt")
    config.seed, config.optimizer.learning_rate, config.log_every_steps = 7, 0.5, 1
    config.stages.long.steps, config.mesh.data, config.model.hidden_dropout_prob = 9, 2, 0.2
    config.remat, config.model.attention = "full", "xla"  # affects rounding only
    differences = workdir.differences(before, RunInfo(config))
    assert {str(difference) for difference in differences} == {
        "seed = 7 (was 0)",
        "stages.long.steps = 9 (was 4)",
        "optimizer.learning_rate = 0.5 (was 0.003)",
        "model.hidden_dropout_prob = 0.2 (was 0.1)",
    }
    assert not any(difference.is_fatal for difference in differences)
    workdir.raise_if_fatal(tmp_path, differences)


def test_fields_that_cannot_change_within_a_workdir_are_refused():
    """The language cannot change because it is a field of `identity`."""
    for field, before, value in (
        ("model.num_hidden_layers", 1, 3), ("optimizer.name", "adam", "lamb"), ("data.language", "en", "de"),
    ):  # fmt: skip
        config = tiny_config("text.txt")
        config.update_from_flattened_dict({field: value})
        differences = workdir.differences(
            RunInfo(tiny_config("text.txt")), RunInfo(config), identity=("data.language",)
        )
        message = f"config.{field} = {value!r}: RUN holds a run with {before!r}; choose another"
        with pytest.raises(UserError, match=message):
            workdir.raise_if_fatal("RUN", differences)


def test_labels_and_vocabulary_are_compared_if_both_runs_have_them():
    config = tiny_config("text.txt")
    one, other = (workdir.tokenizer_entry(pieces(word)) for word in ("ship", "oven"))
    assert workdir.differences(RunInfo(config), RunInfo(config, labels=("a",), tokenizer=one)) == []
    with pytest.raises(UserError, match="RUN holds a run with another tokenizer"):
        workdir.raise_if_fatal(
            "RUN", workdir.differences(RunInfo(config, tokenizer=one), RunInfo(config, tokenizer=other))
        )
    with pytest.raises(UserError, match="RUN holds a run with the labels a, b, but the data has b, a"):
        before, now = RunInfo(config, labels=("a", "b")), RunInfo(config, labels=("b", "a"))
        workdir.raise_if_fatal("RUN", workdir.differences(before, now))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"task": "pretraining"}', '{"task": 3, "model": 4}',
                                     '{"task": "pretraining", "stages": [{"steps": 1}]}'])  # fmt: skip
def test_a_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config.json: damaged"):
        workdir.read_info(tmp_path)
    with pytest.raises(UserError, match="is not the workdir of a run"):
        workdir.require_info(tmp_path / "elsewhere")


def test_later_formats_are_refused_and_earlier_formats_are_read(tmp_path):
    path = tmp_path / "config.json"
    workdir.write_info(tmp_path, RunInfo(tiny_config("text.txt")), None)
    content, info = json.loads(path.read_text()), workdir.read_info(tmp_path)
    assert content["format"] == 1 and "format" not in info.config
    path.write_text(json.dumps({"format": 2, "models": []}))  # a run without this information
    with pytest.raises(UserError) as error:
        workdir.read_info(tmp_path)
    assert (
        str(error.value)
        == f"{path}: format = 2: must be at most 1 for this version of bertjax; install a newer version"
    )
    for wrong in (0, True, "1", 1.5):
        path.write_text(json.dumps(content | {"format": wrong}))
        with pytest.raises(UserError, match=r"config.json: damaged"):
            workdir.read_info(tmp_path)
    del content["format"]
    path.write_text(json.dumps(content))
    assert workdir.read_info(tmp_path) == info


def test_a_workdir_in_a_bucket_stays_there():
    assert str(checkpoint.folder_of("gs://bucket/run")) == "gs://bucket/run/checkpoints"
    assert checkpoint.folder_of("run").is_absolute()


def test_scores_are_stored_in_the_folder_of_the_checkpoint(tmp_path):
    scores = Scores({"f1": 0.5, "other": float("nan")}, 0.5, "here", {"threshold": -1.5})
    checkpoint.write_scores(tmp_path, 7, scores)
    assert checkpoint.read_scores(tmp_path, 7).decided == {"threshold": -1.5}
    assert json.loads((tmp_path / "checkpoints/7/scores.json").read_text())["scores"] == {"f1": 0.5, "other": None}
    assert checkpoint.read_scores(tmp_path, 8) is None
    (tmp_path / "checkpoints/7/scores.json").write_text('{"scores": ')
    with pytest.raises(UserError, match=r"scores.json: damaged"):
        checkpoint.read_scores(tmp_path, 7)


def test_an_old_run_without_new_fields_equals_the_defaults(tmp_path):
    config = fine_tuning_config("ner")
    workdir.write_info(tmp_path, RunInfo(config), None)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["head"]
    for field in ("causal", "family", "norm", "positions"):
        del content["model"][field]
    (tmp_path / "config.json").write_text(json.dumps(content))
    before = workdir.require_info(tmp_path)
    assert workdir.differences(before, RunInfo(config)) == []
    other = fine_tuning_config("ner")
    other.head.lstm_size = 64
    assert [difference.field for difference in workdir.differences(before, RunInfo(other))] == ["head.lstm_size"]

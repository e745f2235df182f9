"""What a workdir remembers."""

import pytest

from bertjax.config import UserError
from bertjax.text import tokenizer
from bertjax.training import checkpoint, run_folder
from tests.conftest import tiny_config


def test_the_tokenizer_that_was_used_is_the_one_that_is_loaded(tmp_path):
    """Also where the config, which names none, says something else than the records that were trained on."""
    cased = tokenizer.WordPiece([*tokenizer.SPECIAL_PIECES, "Paris", "paris"], lowercase=False)
    config = tiny_config("text.txt")
    assert config.tokenizer.lowercase
    run_folder.write_config(tmp_path, config, cased)
    assert run_folder.load_tokenizer(tmp_path).encode("Paris").ids == [5]
    run_folder.check_model(tmp_path, config)


def test_another_vocabulary_of_the_same_size_is_refused(tmp_path):
    one, other = (tokenizer.WordPiece([*tokenizer.SPECIAL_PIECES, word], True) for word in ("ship", "oven"))
    run_folder.check_tokenizer(tmp_path, one)
    run_folder.write_config(tmp_path, tiny_config("text.txt"), one)
    run_folder.check_tokenizer(tmp_path, one)
    with pytest.raises(UserError, match="holds a run with another vocabulary"):
        run_folder.check_tokenizer(tmp_path, other)


def test_what_a_config_changes_is_told(tmp_path):
    pieces = tokenizer.WordPiece([*tokenizer.SPECIAL_PIECES, "ship"], True)
    config = tiny_config("text.txt")
    assert run_folder.changes(tmp_path, config) == []
    run_folder.write_config(tmp_path, config, pieces)
    assert run_folder.changes(tmp_path, config) == []
    config.seed, config.optimizer.learning_rate, config.log_every_steps = 7, 0.5, 1
    config.stages.long.steps = 9
    changed = run_folder.changes(tmp_path, config)
    assert changed[0] == "seed = 7 (was 0)" and changed[-1] == "optimizer.learning_rate = 0.5 (was 0.003)"
    assert len(changed) == 3 and changed[1].startswith("stages = ")


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: damaged"):
        run_folder.read_config(tmp_path)


def test_a_workdir_in_a_bucket_stays_there():
    assert str(checkpoint.folder_of("gs://bucket/run")) == "gs://bucket/run/checkpoints"
    assert checkpoint.folder_of("run").is_absolute()

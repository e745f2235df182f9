"""What a workdir remembers."""

from bertjax.text import tokenizer
from bertjax.training import run_folder
from tests.conftest import tiny_config


def test_the_tokenizer_that_was_used_is_the_one_that_is_loaded(tmp_path):
    """Also where the config, which names none, says something else than the records that were trained on."""
    cased = tokenizer.WordPiece([*tokenizer.SPECIAL_PIECES, "Paris", "paris"], lowercase=False)
    config = tiny_config("text.txt")
    assert config.tokenizer.lowercase
    run_folder.write_config(tmp_path, config, cased)
    assert run_folder.load_tokenizer(tmp_path).encode("Paris").ids == [5]
    run_folder.check_model(tmp_path, config)

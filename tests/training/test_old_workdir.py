"""A run of an earlier version is resumed, used for predictions, and converted."""

import flax.traverse_util
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.interop import conversion, pretrained
from bertjax.launch.start import launch
from bertjax.training.checkpoints import checkpoint
from tests.conftest import extract_golden_workdir, make_corpus
from tests.golden.make_workdir import config_of


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The folder of the run, which also has the text."""
    extract_golden_workdir(tmp_path)
    (tmp_path / "text.txt").write_text(make_corpus(30))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_an_old_run_resumes_with_identical_params(old, capsys):
    config = config_of("text.txt")
    # In the old version, --config.model.hidden_size left the other sizes unchanged; today the same command sets them.
    config.overrides, config.model.intermediate_size = ("model.hidden_size",), 7
    launch(config, "run")
    assert "training in run, from step 5" in capsys.readouterr().out
    assert checkpoint.steps("run") == [5, 8]
    params = flax.traverse_util.flatten_dict(checkpoint.read_params("run", 8), sep="/")
    with np.load("end.npz") as expected:
        assert params.keys() == set(expected.files)
        for name, value in params.items():
            np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_configured_sizes_must_equal_the_sizes_of_the_run(old):
    config = config_of("text.txt")
    config.overrides, config.model.intermediate_size = ("model.hidden_size", "model.intermediate_size"), 7
    with pytest.raises(UserError, match=r"model.intermediate_size"):
        launch(config, "run")


def test_an_old_run_is_read_and_converted(old):
    source = pretrained.read_with_tokenizer("run")
    assert source.step == 5 and source.predicts_words and source.dtype == "float32"
    conversion.convert("run", "theirs", "huggingface")
    again = pretrained.read_pretrained("theirs")
    flat = (flax.traverse_util.flatten_dict(checkpoint_read.params, sep="/") for checkpoint_read in (source, again))
    for (name, expected), (other, actual) in zip(
        *(sorted(checkpoint_read.items()) for checkpoint_read in flat), strict=True
    ):
        assert name == other and np.array_equal(expected, actual), name

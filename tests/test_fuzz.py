"""Eighty of the ten thousand inputs of experiments/benchmarks/fuzz.py, the same inputs in every run."""

import pytest

from experiments.benchmarks import fuzz
from tests.conftest import preparing_in_process

EACH = 10
SLOW = {"resumed workdir": 3, "manifest": 4, "made-up text": 4, "tables": 5}  # most of these train


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    with preparing_in_process():
        fuzz.make_all(list(fuzz.ALL), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.ALL)
def test_damaged_input_ends_in_a_result_or_one_line(good, name):
    ended, message = fuzz.pass_through(name, good, seed=0, number=0)
    assert ended == "result", message  # an undamaged input
    outcomes = [fuzz.pass_through(name, good, seed=0, number=number) for number in range(1, SLOW.get(name, EACH))]
    wrong = [message for ended, message in outcomes if ended not in ("result", "UserError")]
    assert not wrong, wrong[0]
    if name in ("manifest", "records", "tokenizers", "texts", "tables"):  # every byte of these files matters
        assert any(ended == "UserError" for ended, _ in outcomes)

"""Budgets in the notation of users, and the sizes that are chosen for texts, machines and budgets."""

import dataclasses
import math

import pytest
from scipy.stats import binom

from bertjax.common.errors import UserError
from bertjax.config import budget
from bertjax.launch.budget.choice import (
    MOST_EPOCHS,
    MOST_PARAMS_PER_TOKEN,
    TOKENS_PER_PARAM,
    Machine,
    Text,
    choose_sizes,
    flops_per_token,
    kind_of_tokenizer,
    layer_params,
    speed,
)

ONE_CORE = Machine("cpu", devices=1, cores=1, memory=8e9, flops=50e9)
TWO_CORES = Machine("cpu", devices=1, cores=2, memory=24e9, flops=100e9)
H100 = Machine("gpu", devices=1, cores=16, memory=80e9, flops=600e12)
POD = Machine("tpu", devices=32, cores=240, memory=32e9, flops=32 * 200e12)
BOOK, LIBRARY = Text(3e6, 900, (2000, 6000, 20_000)), Text(50e9, 5e7, (800, 3000, 20_000))


def tokens_of(sizes):
    return sum(map(math.prod, zip(sizes.steps, sizes.batch_sizes, sizes.lengths)))


@pytest.mark.parametrize("text, seconds, tokens", [
    ("20min", 1200, math.inf), ("90s", 90, math.inf), ("1h 30min", 5400, math.inf), ("1.5h", 5400, math.inf),
    ("2d", 172_800, math.inf), ("200M", math.inf, 2e8), ("200M tokens", math.inf, 2e8), ("1.5B", math.inf, 1.5e9),
    ("5000 tokens", math.inf, 5000),
])  # fmt: skip
def test_a_budget_is_a_time_or_tokens(text, seconds, tokens):
    assert (budget.parse_budget(text).seconds, budget.parse_budget(text).tokens) == (seconds, tokens)


@pytest.mark.parametrize("text", ["", " ", "20", "min", "0min", "-5min", "20 minutes please", "0M", "infh", "1e9"])
def test_any_other_budget_is_refused(text):
    with pytest.raises(UserError, match="must be a time or a number of tokens, such as 20min"):
        budget.parse_budget(text)


@pytest.mark.parametrize("recipe", ["modern", "bert"])
@pytest.mark.parametrize("machine", [ONE_CORE, TWO_CORES, H100, POD], ids=["one core", "two cores", "H100", "pod"])
@pytest.mark.parametrize("text", [BOOK, LIBRARY], ids=["book", "library"])
@pytest.mark.parametrize("seconds", [60, 1000, 30_000])
def test_the_chosen_size_fits_machine_text_and_time(recipe, machine, text, seconds):
    chosen = choose_sizes(text, machine, seconds, recipe=recipe)
    assert chosen.hidden_size % chosen.heads == 0 and 32 <= chosen.hidden_size // chosen.heads <= 64
    for batch_size, length, steps in zip(chosen.batch_sizes, chosen.lengths, chosen.steps):
        assert batch_size % machine.devices == 0 and steps >= 1 and length <= 512
    is_smallest = chosen.hidden_size == 128
    params = layer_params(recipe, chosen.layers, chosen.hidden_size)
    assert is_smallest or params <= MOST_PARAMS_PER_TOKEN * text.bytes / 4
    assert is_smallest or tokens_of(chosen) >= 0.9 * TOKENS_PER_PARAM * params
    # The steps take the available time, as far as it can be computed.
    of_token = flops_per_token(recipe, chosen.layers, chosen.hidden_size, chosen.vocab_size, chosen.lengths[-1])
    used = tokens_of(chosen) * of_token / speed(machine, chosen.hidden_size)
    ends_early = tokens_of(chosen) >= 0.9 * MOST_EPOCHS * text.bytes / 4
    assert used == pytest.approx(seconds, rel=0.1) or ends_early or sum(chosen.steps) < 20


def test_more_time_or_speed_gives_no_smaller_model():
    def params(machine, seconds, text=LIBRARY):
        chosen = choose_sizes(text, machine, seconds)
        return layer_params("modern", chosen.layers, chosen.hidden_size)

    by_time = [params(TWO_CORES, seconds) for seconds in (60, 600, 6000, 60_000, 600_000)]
    by_speed = [params(machine, 3600) for machine in (ONE_CORE, TWO_CORES, H100, POD)]
    for choices in (by_time, by_speed):
        assert choices == sorted(choices) and choices[-1] > 10 * choices[0]
    assert params(H100, 3600, BOOK) < params(H100, 3600)  # a small text does not justify a large model
    small = dataclasses.replace(H100, memory=1e9)
    assert params(small, 36_000) < params(H100, 36_000)


def test_a_token_budget_is_independent_of_the_speed():
    for machine in (ONE_CORE, H100):
        assert tokens_of(choose_sizes(LIBRARY, machine, math.inf, tokens=2e8)) == pytest.approx(2e8, rel=0.02)


def test_sizes_that_the_user_has_set_are_kept():
    fixed = dict(vocab_size=1000, layers=3, hidden_size=320, batch_size=12, lengths=(64,))
    chosen = choose_sizes(BOOK, TWO_CORES, 600, fixed=fixed)
    assert (chosen.vocab_size, chosen.layers, chosen.hidden_size) == (1000, 3, 320)
    assert (chosen.batch_sizes, chosen.lengths) == ((12,), (64,))
    assert chosen.intermediate_size == 480 and chosen.heads == 5  # follow the hidden size
    chosen = choose_sizes(BOOK, TWO_CORES, 3600, fixed=dict(multiple=4, hidden_size=200))
    assert all(batch_size % 4 == 0 for batch_size in chosen.batch_sizes) and 200 % chosen.heads == 0


def test_sequence_length_and_vocabulary_size_follow_the_text():
    tweets = Text(3e6, 30_000, (80, 140, 200), words=9000)
    assert choose_sizes(tweets, TWO_CORES, 3600).lengths == (64,)
    assert choose_sizes(BOOK, TWO_CORES, 3600).lengths == (128, 512)
    # compiling a second stage would take a tenth of the budget
    assert choose_sizes(BOOK, TWO_CORES, 300).lengths == (128,)
    sizes = [choose_sizes(Text(size, 100, (99, 99, 99)), H100, 600).vocab_size for size in (1e4, 3e6, 1e9, 1e12)]
    assert sizes == sorted(sizes) and sizes[0] >= 640 and sizes[-1] == 32_768
    assert all(size % 128 == 0 for size in sizes)
    assert kind_of_tokenizer("modern", BOOK) == "bpe"
    assert kind_of_tokenizer("bert", BOOK) == "wordpiece"
    assert kind_of_tokenizer("modern", dataclasses.replace(BOOK, latin=0.1)) == "wordpiece"
    assert kind_of_tokenizer("bert", dataclasses.replace(BOOK, latin=0.0, has_spaces=False)) == "bpe"


def test_the_held_out_share_has_limits():
    shares = {text.bytes: choose_sizes(text, TWO_CORES, 600).heldout_fraction for text in (BOOK, LIBRARY)}
    assert shares == {3e6: pytest.approx(200_000 / 3e6, abs=1e-4), 50e9: 0.005}
    for documents in (20, 30, 100):  # with few documents, two documents are nearly always held out
        share = choose_sizes(Text(50e3, documents, (999, 999, 999)), TWO_CORES, 600).heldout_fraction
        assert binom.cdf(1, documents, share) < 0.002

"""Records of `prepare` have the statistics of the records of Google's create_pretraining_data.py from the same text.

tests/golden/make_google_records.py measured the statistics of Google's script once. Two rules differ, too rarely to
show: after ten draws, Google's script takes the document itself as random next, and if segment B was cut within a word,
Google's script counts the rest of this word as part of the last word of A.
"""

import hashlib
import itertools
import json
import math
import pathlib
import random
import re

import numpy as np
import pytest

from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.data.preprocessing import preparation
from bertjax.data.records.record_sets import find_records
from tests.conftest import heldout_batches

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "google_records.json"
LENGTH, PREDICTIONS, DUPE_FACTOR = 64, 8, 10  # 8 < 0.15 * 64: full rows reach the limit
SEEDS = 10
MAX_ERRORS = 5  # standard errors of the difference; there are 45 figures

SYLLABLES = ["".join(letters) for letters in itertools.product("bdfgklmnprstvz", "aeiou")]
FIRST, LAST = "the", "."  # words of a sentence that occur in no other sentence


def make_words() -> list[str]:
    """400 words of one to five syllables, frequent words first. All randomness here is deterministic."""
    rng = random.Random(0)
    return ["".join(rng.choices(SYLLABLES, k=1 + int(4 * rng.random() ** 2 + i / 400))) for i in range(400)]


def make_vocabulary() -> list[str]:
    """A vocabulary for `make_text`: frequent words are one token, other words are several tokens."""
    pieces = [*SYLLABLES, *(f"##{syllable}" for syllable in SYLLABLES), *make_words()[:50]]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", FIRST, LAST, *dict.fromkeys(pieces)]


def make_text() -> str:
    """One sentence per line, of 1 to 60 words; 60 documents of 1 to some 50 sentences, separated by blank lines."""
    rng, words = random.Random(1), make_words()
    frequencies = [1 / (rank + 3) for rank in range(len(words))]

    def sentence() -> str:
        size = max(1, min(60, round(math.exp(rng.gauss(2.2, 0.7)))))
        return " ".join([FIRST, *rng.choices(words, frequencies, k=size), LAST])

    documents = ("\n".join(sentence() for _ in range(1 + int(rng.expovariate(0.08)))) for _ in range(60))
    return "\n\n".join(documents) + "\n"


def fingerprint() -> str:
    return hashlib.sha256("\n".join([make_text(), *make_vocabulary()]).encode()).hexdigest()[:16]


def read(folder: pathlib.Path) -> dict[str, np.ndarray]:
    files = find_records(folder, LENGTH, PREDICTIONS, "train", len(make_vocabulary()))
    batches = heldout_batches(files, LENGTH, PREDICTIONS, batch_size=files.total, max_sequences=files.total)
    return next(batches)


def figures(batch: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the compared figures by name: numbers that describe a set of records."""
    pieces = make_vocabulary()
    first, last, separator, mask = (pieces.index(piece) for piece in (FIRST, LAST, "[SEP]", "[MASK]"))
    rows, inside = np.arange(len(batch["input_ids"])), batch["segments"] == 1
    sizes, second = inside.sum(1), batch["token_types"].sum(1) - 1  # without the final [SEP]
    sizes_first = sizes - second - 3
    is_random = batch["pair_labels"] == 1

    used = batch["word_weights"] == 1
    of_row, place, labels = np.nonzero(used)[0], batch["word_positions"][used], batch["word_ids"][used]
    masked, shown = used.sum(1), batch["input_ids"][of_row, place]
    chosen, ids = np.zeros(inside.shape, bool), batch["input_ids"].copy()
    chosen[of_row, place], ids[of_row, place] = True, labels
    continues = np.array([piece.startswith("##") for piece in pieces])[ids]
    follows = continues[:, 1:] & (ids[:, :-1] != separator) & (np.arange(1, LENGTH) > 1)

    statistics = {
        "records": len(rows),
        "random next": is_random.mean(),
        "tokens a row": sizes.mean(),
        "tokens of segment A": sizes_first.mean(),
        "tokens of segment B, random next": second[is_random].mean(),
        "tokens of segment B, actual next": second[~is_random].mean(),
        "segments A one token longer than B": (sizes_first == second + 1).mean(),
        "segments A that begin with a sentence": (ids[:, 1] == first).mean(),
        "segments A that end with a sentence": (ids[rows, sizes_first] == last).mean(),
        "segments B that begin with a sentence": (ids[rows, sizes_first + 2] == first).mean(),
        "segments B that end with a sentence": (ids[rows, sizes - 2] == last).mean(),
        "masked tokens": masked.sum() / sizes.sum(),
        "masked tokens a row": masked.mean(),
        "of them [MASK]": (shown == mask).mean(),
        "of them unchanged": (shown == labels).mean(),
        "of them another piece": ((shown != mask) & (shown != labels)).mean(),
        "of them in segment B": batch["token_types"][of_row, place].mean(),
        "of them pieces that continue a word": continues[of_row, place].mean(),
        "words masked in part": (chosen[:, 1:] != chosen[:, :-1])[follows].mean(),
    }
    for name, values, edges in (
        ("tokens a row", sizes, range(0, LENGTH + 1, 8)),
        ("tokens of segment A", sizes_first, range(0, LENGTH + 1, 8)),
        ("masked tokens a row", masked, range(1, PREDICTIONS + 2)),
    ):
        counts, _ = np.histogram(values, list(edges))
        statistics |= {f"{name} from {edge}": count / len(rows) for edge, count in zip(edges, counts)}

    text = ids.astype("<u4").tobytes().decode("utf-32-le")  # ids as characters
    sentences = re.findall(f"{chr(first)}[^{chr(separator)}{chr(last)}]*{chr(last)}", text)
    statistics |= {"whole sentences": len(sentences), "distinct whole sentences": len(set(sentences))}
    return {name: float(value) for name, value in statistics.items()}


def summarize(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Maps the figures of several seeds to the mean and standard deviation of each figure over the seeds."""
    values = {name: [run[name] for run in runs] for name in runs[0]}
    return {name: [float(np.mean(x)), float(np.std(x, ddof=1))] for name, x in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["tokens", "whole words"])
def test_prepared_records_have_the_statistics_of_googles_records(masks, tmp_path, in_process):
    golden = json.loads(GOLDEN.read_text())
    assert golden["fingerprint"] == fingerprint(), "the text has changed: run tests/golden/make_google_records.py"
    (tmp_path / "text.txt").write_text(make_text())
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in make_vocabulary()))
    config = pretraining_config()
    config.data.update(corpus=str(tmp_path / "text.txt"), split_sentences=False, heldout_fraction=0.0)
    config.data.update(dupe_factor=DUPE_FACTOR, do_whole_word_mask=masks == "whole words")
    config.tokenizer.path, config.model.vocab_size = str(tmp_path / "vocab.txt"), len(make_vocabulary())
    config.stages = named_stages(only=stage(1, LENGTH, PREDICTIONS))

    runs = []
    for seed in range(SEEDS):
        config.data.seed = seed
        preparation.prepare(config, tmp_path / f"{seed}")
        runs.append(figures(read(tmp_path / f"{seed}")))

    golden_figures, differing = golden[masks], []
    for name, (mean, deviation) in summarize(runs).items():
        their_mean, their_deviation = golden_figures[name]
        error = math.hypot(deviation / SEEDS**0.5, their_deviation / golden["seeds"] ** 0.5)
        if abs(mean - their_mean) > MAX_ERRORS * error:
            differing.append(f"{name}: {mean:.5g}, theirs {their_mean:.5g}, standard error {error:.2g}")
    assert not differing, "; ".join(differing)

"""Writes tests/golden/google_records.json: statistics of the records that Google's script makes of a test text.

Command: python -m tests.golden.make_google_records FOLDER (a checkout of google-research/bert); ten minutes
"""

import json
import pathlib
import sys
import tempfile

from experiments.benchmarks import google_records
from tests.data import test_google_statistics as test

SEEDS = 24


def measure(google: str, folder: pathlib.Path, seed: int, whole_words: bool) -> dict[str, float]:
    google_records.create(
        google,
        input_file=folder / "text.txt",
        vocab_file=folder / "vocab.txt",
        output_file=folder / "only.tfrecord",
        random_seed=seed,
        max_seq_length=test.LENGTH,
        max_predictions_per_seq=test.PREDICTIONS,
        dupe_factor=test.DUPE_FACTOR,
        do_whole_word_mask=whole_words,
    )
    return test.figures(test.read(folder))


def main(google: str) -> None:
    content = {"fingerprint": test.fingerprint(), "seeds": SEEDS}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "text.txt").write_text(test.make_text())
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in test.make_vocabulary()))
        for masks in ("tokens", "whole words"):
            runs = [measure(google, folder, seed, masks == "whole words") for seed in range(SEEDS)]
            content[masks] = test.summarize(runs)
    test.GOLDEN.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

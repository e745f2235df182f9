"""Writes tests/golden/squad.json.gz: random questions, and their scores by SQuAD's official scripts.

Command: python -m tests.golden.make_squad evaluate-v1.1.py evaluate-v2.0.py (as rajpurkar.github.io/SQuAD-explorer has
them)
"""

import gzip
import importlib.util
import json
import pathlib
import random
import sys

PATH = pathlib.Path(__file__).parent / "squad.json.gz"
BY_HAND = 21  # the first questions of the file
LETTERS = "aAnNtThHeE  \t\u00a0.,'-_“\u2013éİß東京1"


def random_text(rng, words="a the an cat Cat cat's dog, dog . ! é É 東京 x-y The,an -- \u00a0 “a” a\u2013b"):
    return rng.choice(["", " ", "  "]).join(rng.choices(words.split(" "), k=rng.randrange(5)))


def random_questions(rng, text):
    names = [str(i) for i in range(rng.randrange(1, 8))]
    golds = {name: [text(rng) for _ in range(rng.choice([0, 0, 1, 2, 3]))] for name in names}
    # Whole numbers, so that some are equal.
    odds = {name: rng.choice([float(rng.randrange(-4, 4)), rng.gauss(0, 3)]) for name in names}
    return golds, {name: rng.choice([text(rng), *golds[name]]) for name in names}, odds


def load(path: str):
    spec = importlib.util.spec_from_file_location("official", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_data(golds: dict[str, list[str]]) -> list[dict]:
    asked = [{"id": name, "answers": [{"text": text} for text in texts]} for name, texts in golds.items()]
    return [{"paragraphs": [{"qas": asked}]}]


def main(v1, v2) -> None:
    def letters(rng):
        return "".join(rng.choices(LETTERS, k=rng.randrange(12)))

    def score(golds, prediction):
        """Returns exact match and F1 by the script 1.1, which requires an answer, and by 2.0."""
        data, predictions = as_data({"1": golds}), {"1": prediction}
        first = [x / 100 for x in v1.evaluate(data, predictions).values()] if golds else [None, None]
        return [*first, *(scores["1"] for scores in v2.get_raw_scores(data, predictions))]

    rng = random.Random(3)
    before = json.loads(gzip.decompress(PATH.read_bytes()))
    questions = [(golds, prediction) for golds, prediction, *_ in before["questions"][:BY_HAND]]
    for i in range(4000):
        text = (random_text, letters)[i % 2]
        golds = [text(rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        questions.append((golds, rng.choice([text(rng), text(rng), *golds])))

    searches = []
    for _ in range(500):
        # Distinct odds, and no answers that consist of articles only: then the threshold search of the script is exact.
        golds, predictions, odds = random_questions(rng, lambda r: " ".join(r.choices("xyz", k=r.randrange(1, 4))))
        odds = {name: odd + 1e-6 * i for i, (name, odd) in enumerate(odds.items())}
        has_answer = v2.make_qid_to_has_ans(as_data(golds))
        exact, f1 = v2.get_raw_scores(as_data(golds), predictions)
        best_exact, _ = v2.find_best_thresh(predictions, exact, odds, has_answer)
        best_f1, threshold = v2.find_best_thresh(predictions, f1, odds, has_answer)
        searches.append([golds, predictions, odds, best_exact, best_f1, threshold])
    content = {"questions": [[*asked, *score(*asked)] for asked in questions], "searches": searches}
    PATH.write_bytes(gzip.compress(json.dumps(content, ensure_ascii=False).encode(), mtime=0))


if __name__ == "__main__":
    main(*map(load, sys.argv[1:]))

"""Checks that the examples of SQuAD and CoNLL-2003 contain every answer, and every word with its tag.

Command:  python -m experiments.benchmarks.coverage --squad=FOLDER --conll=FOLDER --vocabulary=vocab.txt [--cased]
Hardware: 2 CPU cores, about two minutes
Score:    see RESULTS.md
"""

import argparse
import collections
import pathlib

import numpy as np

from bertjax.finetuning import conll, question_windows, squad_files, word_encoding
from bertjax.text import tokenizer


def answers(path: pathlib.Path, pieces) -> None:
    """Counts the answers that equal the text of their labelled tokens, and the reasons of the remaining answers."""
    questions = squad_files.read_squad(path)
    encoded = question_windows.encode_question_windows(
        questions, pieces, question_windows.WindowSizes(384, 128, 64), with_labels=True
    )
    examples, windows, reasons, learnt = encoded.examples, encoded.windows, collections.Counter(), {}
    for (first, last), window in zip(examples.labels, windows):
        if first:
            span = window.offsets[[first - window.first, last - window.first]]
            learnt[window.question] = questions[window.question].context[span[0, 0] : span[1, 1]]
    shown = []
    for number, question in enumerate(questions):
        if not question.answers:
            continue
        answer, found = question.answers[0], learnt.get(number)
        if found == answer:
            reasons["the answer itself"] += 1
        elif found is None:
            reasons["in no window whole"] += 1
        elif found.strip() == answer.strip():
            reasons["but for blanks at its ends"] += 1
        else:
            reasons["begins or ends within a word"] += 1
            shown.append((answer, found))
    total = sum(reasons.values())
    print(f"{path.name}: {total} answerable questions, {len(windows)} windows")
    for reason, count in reasons.most_common():
        print(f"  {reason}: {count} ({100 * count / total:.3f} %)")
    print("  such as " + ", ".join(f"{answer!r} in {found!r}" for answer, found in shown[:5]))


def words(path: pathlib.Path, pieces) -> None:
    """Counts the words that the windows contain once, in order, with their tags."""
    sentences = conll.read_conll(path)
    labels = conll.tag_names(sentences)
    for with_context in (True, False):
        examples = word_encoding.encode_word_sequences(sentences, labels, pieces, 256, with_context)
        marks = np.concatenate([np.asarray(x) for x in examples.labels])
        ids = np.concatenate(examples.input_ids)[marks >= 0]
        tags = [labels[mark] for mark in marks[marks >= 0]]
        wanted = [tag for sentence in sentences for tag in sentence.tags]
        all_words = [word for sentence in sentences for word in sentence.words]
        firsts = [found[0] if found else pieces.unk_id for found in pieces.encode_ids(all_words)]
        same = sum(a == b for a, b in zip(tags, wanted)), sum(a == b for a, b in zip(ids, firsts))
        print(
            f"{path.name}, {'with' if with_context else 'without'} context: {len(wanted)} words of {len(sentences)} "
            f"sentences in {len(examples)} sequences; {len(tags)} labelled pieces, {same[0]} with their word's tag, "
            f"{same[1]} its first piece"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("squad", "conll", "vocabulary"):
        parser.add_argument(f"--{name}", required=True, type=pathlib.Path)
    parser.add_argument("--cased", action="store_true")
    arguments = parser.parse_args()
    pieces = tokenizer.load_tokenizer("wordpiece", arguments.vocabulary, lowercase=not arguments.cased)
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        answers(arguments.squad / name, pieces)
    for name in ("eng.train", "eng.testa", "eng.testb"):
        words(arguments.conll / name, pieces)


if __name__ == "__main__":
    main()

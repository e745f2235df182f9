"""Tagging of the user's own data: CSV or TSV with one word per row, or JSON lines with one sentence per row."""

import dataclasses
import itertools

from etils import epath

from bertjax.common.errors import UserError
from bertjax.data.corpus import holdout
from bertjax.data.corpus.tables import Row, cell, column, find_table, read_table
from bertjax.finetuning.task import Dataset, Split
from bertjax.finetuning.tasks import ner
from bertjax.finetuning.tasks.ner import Sentence
from bertjax.inference.output_layers import OutputLayer
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.words import join_of


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the tables; the labels are the training tags. Raises `UserError` for missing or invalid files."""
    data, note = config.data, ""
    if holdout.is_one_file(data.path):
        train, dev, note = _divided(read_like(data, data.path), data)
    else:
        train, dev = (read_like(data, find_table(data.path, name)) for name in ("train", "dev"))
    tags = {tag for sentence in train for tag in sentence.tags}
    has_entities = all(map(ner.is_bio, tags))
    if not has_entities and any(ner.is_bio(tag) and tag != "O" for tag in tags):
        place, odd = next((p, t) for s in train for p, t in zip(s.where, s.tags) if not ner.is_bio(t))
        raise UserError(
            f"{place}: the tag is {odd!r}, but other tags are B-type or I-type; use O, B-type and I-type for all"
        )
    labels = ner.tag_names(train) if has_entities else tuple(sorted(tags))
    found = ner.dataset(train, dev, labels, tokenizer, config.max_seq_length, False, join_of(config))
    return dataclasses.replace(found, notes=(note, *found.notes)) if note else found


def read_like(data, path: epath.PathLike) -> list[Sentence]:
    """Reads the sentences of a table with the columns that `config.data` names."""
    return read(epath.Path(path), data.words, data.tags, data.sentence)


def _divided(sentences: list[Sentence], data) -> tuple[list[Sentence], list[Sentence], str]:
    """Returns the training sentences and the held-out sentences of one table, and the line that states the split.

    Raises `UserError` if the table has too few sentences.
    """
    tags = [sorted(set(sentence.tags)) for sentence in sentences]
    chosen = holdout.choose(tags, holdout.seed_of(data), stratified=False)
    holdout.require(len(chosen), len(sentences), data, "sentences")
    train, dev = ([s for i, s in enumerate(sentences) if (i in chosen) == is_dev] for is_dev in (False, True))
    return train, dev, holdout.describe(len(dev), len(sentences), data, "sentences")


def read(path: epath.Path, words: str, tags: str, sentence: str) -> list[Sentence]:
    """Reads the sentences of a table.

    Args:
      words, tags: names of the columns; in JSON lines, fields with lists.
      sentence: name of the column that identifies the sentence of a row; empty means the same as in the row before.
        Not used for JSON lines.

    Converts IOB1 tags to BIO. Raises `UserError` with file, line and the expected value.
    """
    rows, _ = read_table(path)
    if path.suffix == ".jsonl":
        found = [_sentence(row, words, tags) for row in rows]
    else:
        names = [column(row, sentence).strip() for row in rows]
        if not names[0]:
            raise UserError(f"{rows[0].where}: {sentence} is empty; the first row of a sentence names it")
        names = itertools.accumulate(names, lambda before, own: own or before)
        cells = ((column(row, words).strip(), column(row, tags).strip(), row.where) for row in rows)
        groups = itertools.groupby(zip(cells, names), key=lambda x: x[1])
        found = [tuple(zip(*(each for each, _ in group))) for _, group in groups]
    for its_words, its_tags, where in found:
        for word, tag, place in zip(its_words, its_tags, where):
            if not word or tag.lower() in ("", "nan", "<na>"):
                raise UserError(f"{place}: the word is {word!r} and its tag {tag!r}, both must be set")
            if "\n" in word:  # a quotation mark of another row ended the cell
                raise UserError(f'{place}: the word has several lines; write a quotation mark as """", four of them')
    if all(ner.is_bio(tag) for _, its_tags, _ in found for tag in its_tags):
        found = [(its_words, ner.to_bio(its_tags), where) for its_words, its_tags, where in found]
    sentences = [Sentence(its_words, its_tags, i, where) for i, (its_words, its_tags, where) in enumerate(found)]
    ner.check_words(sentences, f"config.data.words = {words!r}: the column")
    return sentences


def _sentence(row: Row, words: str, tags: str) -> tuple[tuple, tuple, tuple]:
    """Returns (words, tags, places) of a row with a whole sentence."""
    its_words, its_tags = _list(row, words), _list(row, tags)
    if len(its_words) != len(its_tags) or not its_words:
        raise UserError(
            f"{row.where}: {len(its_words)} words and {len(its_tags)} tags, expected equal numbers, at least one"
        )
    return tuple(its_words), tuple(its_tags), (row.where,) * len(its_words)


def _list(row: Row, name: str) -> list[str]:
    value = cell(row, name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(f"{row.where}: {name} is not a list of strings")
    return [item.strip() for item in value]


def labelled(source: Pretrained, path: str) -> tuple[OutputLayer, Split]:
    """Returns the output layer, and the sentences of a table with how they are scored.

    Of the one file that the run has read, the sentences are the held-out ones.
    """
    data, note = source.settings.data, ""
    sentences = read_like(data, path)
    if holdout.is_file_of_run(path, data, source.fingerprints):
        _, sentences, note = _divided(sentences, data)
    layer, split = ner.of_sentences(source, sentences)
    return layer, dataclasses.replace(split, note="\n".join(filter(None, (note, split.note))))


TASK = dataclasses.replace(ner.TASK, load=load, labelled=labelled, identity=("data.heldout_seed", "data.join"))

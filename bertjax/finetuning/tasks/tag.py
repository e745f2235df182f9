"""Tagging of the user's own data: CSV or TSV with one word per row, or JSON lines with one sentence per row."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.data.corpus import holdout
from bertjax.data.corpus.tables import Row, cell, check_columns, column, find_table, read_table
from bertjax.finetuning import conll, tagging
from bertjax.finetuning.conll import Sentence
from bertjax.finetuning.tagging import TaggedSentences, TaggingTask
from bertjax.inference.task import TaskData
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.words import join_of


class Tag(TaggingTask):
    """Tagging of the words in the user's own tables."""

    identity = ("data.heldout_seed", "data.join")

    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads the tables; the labels are the training tags. Raises `UserError` for missing or invalid files."""
        data, notes = config.data, []
        if holdout.is_one_file(data.path):
            train, dev, note = _divided(_read_table(data, data.path), data)
            notes.append(note)
        else:
            train, dev = (_read_table(data, find_table(data.path, name)) for name in ("train", "dev"))
        labels, join = _labels(train), join_of(config)
        head = self.head_for(len(labels))
        task_data = tagging.make_tagging_data(train, dev, labels, head, tokenizer, config.max_seq_length, False, join)
        return dataclasses.replace(task_data, notes=(*notes, *task_data.notes))

    def read_labelled(self, source: Pretrained, path: str, **flags: Any) -> TaggedSentences:
        """Returns the sentences of a table; only the held-out sentences if the run was trained on this table."""
        data, note = source.settings.data, ""
        sentences = _read_table(data, path)
        if holdout.is_file_of_run(path, data, source.fingerprints):
            _, sentences, note = _divided(sentences, data)
        return self.labelled_sentences(source, sentences, note=note)


TASK = Tag()


def _labels(train: Sequence[Sentence]) -> tuple[str, ...]:
    """Returns the labels of training sentences. Raises `UserError` if only some tags are BIO."""
    tags = {tag for sentence in train for tag in sentence.tags}
    if all(map(conll.is_bio, tags)):
        return conll.tag_names(train)
    if any(conll.is_bio(tag) and tag != "O" for tag in tags):
        place, odd = next((p, t) for s in train for p, t in zip(s.where, s.tags) if not conll.is_bio(t))
        raise UserError(
            f"{place}: the tag is {odd!r}, but other tags are B-type or I-type; use O, B-type and I-type for all"
        )
    return tuple(sorted(tags))


def _read_table(data: ConfigDict, path: epath.PathLike) -> list[Sentence]:
    """Reads the sentences of a table with the columns that `config.data` names."""
    return read_sentences(epath.Path(path), data.words, data.tags, data.sentence)


def _divided(sentences: list[Sentence], data: ConfigDict) -> tuple[list[Sentence], list[Sentence], str]:
    """Returns the training sentences and the held-out sentences of one table, and the line that states the split.

    Raises:
      UserError: if the table has too few sentences.
    """
    tags = [sorted(set(sentence.tags)) for sentence in sentences]
    chosen = holdout.choose_heldout(tags, holdout.seed_of(data), stratified=False)
    holdout.require_heldout(len(chosen), len(sentences), data, "sentences")
    train, dev = ([s for i, s in enumerate(sentences) if (i in chosen) == is_dev] for is_dev in (False, True))
    return train, dev, holdout.describe_split(len(dev), len(sentences), data, "sentences")


def read_sentences(path: epath.Path, words: str, tags: str, sentence: str) -> list[Sentence]:
    """Reads the sentences of a table, and converts IOB1 tags to BIO.

    Args:
      path: the table.
      words: the name of the column of words; in JSON lines, a field with a list.
      tags: the name of the column of tags; in JSON lines, a field with a list.
      sentence: the name of the column that identifies the sentence of a row; an empty cell continues the sentence of
        the row before. JSON lines do not need this column.

    Raises:
      UserError: for an invalid row: file, line and the expected value.
    """
    rows, _ = read_table(path)
    fields = {"--config.data.words": [words], "--config.data.tags": [tags]}
    if path.suffix == ".jsonl":
        check_columns(rows[0], fields)
        tagged_words = [_sentence(row, words, tags) for row in rows]
    else:
        check_columns(rows[0], {**fields, "--config.data.sentence": [sentence]})
        names = [column(row, sentence).strip() for row in rows]
        if not names[0]:
            raise UserError(f"{rows[0].where}: {sentence} is empty; write the name of the sentence in the first row")
        for number, name in enumerate(names):
            names[number] = name or names[number - 1]
        cells = ((column(row, words).strip(), column(row, tags).strip(), row.where) for row in rows)
        groups = itertools.groupby(zip(cells, names), key=lambda cell_and_name: cell_and_name[1])
        tagged_words = []
        for _, group in groups:
            sentence_words, sentence_tags, where = zip(*(cell for cell, _ in group))
            tagged_words.append((sentence_words, sentence_tags, where))
    for sentence_words, sentence_tags, where in tagged_words:
        for word, tag, place in zip(sentence_words, sentence_tags, where):
            if not word or tag.lower() in ("", "nan", "<na>"):
                raise UserError(f"{place}: the word is {word!r} and the tag {tag!r}; set both")
            if "\n" in word:  # A quotation mark of another row ended the cell.
                raise UserError(f'{place}: the word has several lines; write a quotation mark as """" (four marks)')
    is_bio = all(conll.is_bio(tag) for _, sentence_tags, _ in tagged_words for tag in sentence_tags)
    sentences = [
        Sentence(sentence_words, conll.to_bio(sentence_tags) if is_bio else sentence_tags, number, where)
        for number, (sentence_words, sentence_tags, where) in enumerate(tagged_words)
    ]
    conll.check_words(sentences, f"config.data.words = {words!r}: the column")
    return sentences


def _sentence(row: Row, words: str, tags: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Returns the words, their tags, and FILE:LINE of each word, of a row with a whole sentence."""
    word_list, tag_list = _list(row, words), _list(row, tags)
    if len(word_list) != len(tag_list) or not word_list:
        raise UserError(
            f"{row.where}: {len(word_list)} words and {len(tag_list)} tags, expected equal numbers, at least one"
        )
    return tuple(word_list), tuple(tag_list), (row.where,) * len(word_list)


def _list(row: Row, name: str) -> list[str]:
    value = cell(row, name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(f"{row.where}: {name} is not a list of strings")
    return [item.strip() for item in value]

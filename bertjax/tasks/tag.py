"""The user's own tagged words: CSV or TSV with a word a row, or JSON lines with a sentence a row."""

import itertools
import json

from etils import epath

from bertjax.config import UserError
from bertjax.data.tables import Row, column, find_table, read_table
from bertjax.tasks import ner
from bertjax.tasks.finetuning import Dataset
from bertjax.tasks.ner import Sentence
from bertjax.text.tokenizer import Tokenizer


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Tags are those of the training file. Raises `UserError` for what is missing or wrong in the files."""
    data = config.data
    train, dev = (read(find_table(data.path, name), data.words, data.tags, data.sentence) for name in ("train", "dev"))
    tags = {tag for sentence in train for tag in sentence.tags}
    labels = ner.tag_names(train) if all(map(ner.is_bio, tags)) else tuple(sorted(tags))
    return ner.dataset(train, dev, labels, tokenizer, config.max_seq_length, with_context=False)


def read(path: epath.Path, words: str, tags: str, sentence: str) -> list[Sentence]:
    """The sentences of a table with these columns; `sentence` is the same, or empty after the first, in all rows of
    one; JSON lines have none.

    Tags that are IOB1 become BIO. Raises `UserError`: file and line, and what was expected.
    """
    rows, _ = read_table(path)
    if path.suffix == ".jsonl":
        found = [(row.where, _list(row, words), _list(row, tags)) for row in rows]
    else:
        names = itertools.accumulate((column(row, sentence) for row in rows), lambda before, own: own or before)
        groups = [[row for row, _ in group] for _, group in itertools.groupby(zip(rows, names), key=lambda x: x[1])]
        found = [
            (group[0].where, [column(row, words) for row in group], [column(row, tags) for row in group])
            for group in groups
        ]
    for where, its_words, its_tags in found:
        if len(its_words) != len(its_tags) or not its_words:
            raise UserError(
                f"{where}: {len(its_words)} words and {len(its_tags)} tags, expected as many, and one at least"
            )
    if all(ner.is_bio(tag) for _, _, its_tags in found for tag in its_tags):
        found = [(where, its_words, ner.to_bio(its_tags)) for where, its_words, its_tags in found]
    return [Sentence(tuple(w), tuple(t), number, where) for number, (where, w, t) in enumerate(found)]


def _list(row: Row, name: str) -> list[str]:
    try:
        value = json.loads(column(row, name))
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise UserError(f"{row.where}: {name} is no list of strings")
    return value

"""The user's own table of texts, or pairs of texts, and labels: CSV, TSV or JSON lines."""

from etils import epath

from bertjax.config import UserError
from bertjax.data.tables import column, read_table
from bertjax.tasks import classification
from bertjax.tasks.classification import Columns, Table
from bertjax.tasks.finetuning import Dataset
from bertjax.text.tokenizer import Tokenizer

SUFFIXES = (".csv", ".tsv", ".jsonl")


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Labels are those of the training file, sorted. Raises `UserError` for what is missing or wrong in the files."""
    columns = Columns(config.data.text, config.data.second_text, config.data.label)
    train, dev = (read_table(find_file(config.data.path, name))[0] for name in ("train", "dev"))
    labels = () if config.data.is_number else tuple(sorted({column(row, columns.label) for row in train}))
    if len(labels) == 1:
        raise UserError(f"config.data.label = {columns.label!r}: all of {config.data.path} is {labels[0]!r}")
    scores = ("spearman", "pearson") if config.data.is_number else ("accuracy", "macro_f1")
    return classification.dataset(
        Table(train, columns), [Table(dev, columns)], labels, scores, tokenizer, config.max_seq_length
    )


def find_file(folder: str, name: str) -> epath.Path:
    """train.csv, train.tsv or train.jsonl of a folder."""
    found = [path for suffix in SUFFIXES if (path := epath.Path(folder) / (name + suffix)).exists()]
    if len(found) != 1:
        which = f"both {found[0].name} and {found[1].name}" if found else f"no {name}.csv, {name}.tsv or {name}.jsonl"
        raise UserError(f"config.data.path = {folder!r}: {which} in it")
    return found[0]

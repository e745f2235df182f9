"""The user's own table of texts, or pairs of texts, and labels: CSV, TSV or JSON lines."""

from bertjax.config import UserError
from bertjax.data.tables import column, find_table, read_table
from bertjax.tasks import classification
from bertjax.tasks.classification import Columns, Table
from bertjax.tasks.finetuning import Dataset, FineTuningTask
from bertjax.text.tokenizer import Tokenizer


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Labels are those of the training file, sorted. Raises `UserError` for what is missing or wrong in the files."""
    columns = Columns(config.data.text, config.data.second_text, config.data.label)
    train, dev = (read_table(find_table(config.data.path, name))[0] for name in ("train", "dev"))
    for row in (*train, *dev):
        if not column(row, columns.label).strip():
            raise UserError(f"{row.where}: {columns.label} is empty; leave out what has no label")
    labels = () if config.data.is_number else tuple(sorted({column(row, columns.label) for row in train}))
    if len(labels) == 1:
        raise UserError(f"config.data.label = {columns.label!r}: all of {config.data.path} is {labels[0]!r}")
    scores = ("spearman", "pearson") if config.data.is_number else ("accuracy", "macro_f1")
    return classification.dataset(
        Table(train, columns), [Table(dev, columns)], labels, scores, tokenizer, config.max_seq_length
    )


TASK = FineTuningTask(
    architecture="BertForSequenceClassification",
    inputs=classification.INPUTS,
    load=load,
    predict=classification.predict,
    identity=("data.is_number",),
)

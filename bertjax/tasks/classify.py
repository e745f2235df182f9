"""Classification or regression of the user's own texts or pairs of texts, from CSV, TSV or JSON lines."""

from bertjax.config import UserError
from bertjax.data.documents.tables import find_table, read_table
from bertjax.tasks import classification
from bertjax.tasks.classification import Columns, Table
from bertjax.tasks.finetuning import Dataset, FineTuningTask
from bertjax.text.tokenizer import Tokenizer


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the tables; the classes are the sorted training labels. Raises `UserError` for missing or invalid files."""
    columns = Columns(config.data.text, config.data.second_text, config.data.label)
    train, dev = (read_table(find_table(config.data.path, name))[0] for name in ("train", "dev"))
    labels = () if config.data.is_number else classification.classes(train, columns.label)
    if len(labels) == 1:
        raise UserError(
            f"config.data.label = {columns.label!r}: all training labels in {config.data.path} are {labels[0]!r}"
        )
    metric_names = ("spearman", "pearson") if config.data.is_number else ("accuracy", "macro_f1")
    return classification.dataset(
        Table(train, columns), [Table(dev, columns)], labels, metric_names, tokenizer, config.max_seq_length
    )


TASK = FineTuningTask(
    architecture="BertForSequenceClassification",
    inputs=classification.INPUTS,
    load=load,
    predict=classification.predict,
    identity=("data.is_number",),
)

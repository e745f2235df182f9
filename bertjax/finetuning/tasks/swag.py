"""SWAG: choosing the correct one of four endings (Devlin et al. 2019, section 4.4)."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.data.corpus.tables import TFDS, Row, column, missing_file, read_table, read_tfds
from bertjax.data.loading.examples import Examples
from bertjax.finetuning import metrics
from bertjax.finetuning.contamination import seen_in_training
from bertjax.finetuning.encoding import encode_pairs
from bertjax.finetuning.table_summary import TableSummary
from bertjax.inference import predictor
from bertjax.inference.heads import ChoiceHead, Head
from bertjax.inference.task import FineTuningTask, InputForm, Split, TaskData
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.text.tokenizer import Tokenizer

ENDINGS = ("ending0", "ending1", "ending2", "ending3")


@dataclasses.dataclass(frozen=True)
class Choices(Split):
    """Sentences with endings. `labels` `[examples]` are the indices of the correct endings."""

    labels: np.ndarray

    def score(self, predictions: list[np.ndarray]) -> dict[str, float]:
        """Returns the accuracy of the most likely endings."""
        return {"accuracy": metrics.accuracy(self.labels, np.stack(predictions)[..., 0].argmax(-1))}


class Swag(FineTuningTask):
    """Multiple choice: the correct ending of a sentence."""

    architecture = "BertForMultipleChoice"
    inputs = InputForm(range(3, 100), '"sentence ||| ending ||| ending ..."')

    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads train.csv and val.csv of the folder. Raises `UserError` for missing or invalid files."""
        splits, texts = [], []
        notes: list[str] = []
        for file, tfds_split, name in (("train.csv", "train", "training"), ("val.csv", "validation", "dev")):
            rows = _read(config.data.path, file, tfds_split)
            choices = [(column(row, "sent1"), _endings(row)) for row in rows]
            labels = np.array([_label(row) for row in rows])
            examples, lost = encode_endings(choices, labels, tokenizer, config.max_seq_length)
            splits.append(examples)
            texts.append([(sentence, *endings) for sentence, endings in choices])
            summary = TableSummary(name, len(rows), examples, tokenizer, parts=2, lost=lost.tolist())
            notes += summary.lines(config.max_seq_length)
        train, dev = splits
        notes += seen_in_training(texts[0], ("dev examples", texts[1]))
        baseline = float(np.bincount(labels).max() / len(dev))  # The last labels are the labels of the dev set.
        return TaskData(ChoiceHead(), (), train, (Choices(dev, labels),), "accuracy", tuple(notes), baseline)

    def head(self, source: Pretrained) -> Head:
        """Returns the head of a checkpoint."""
        return ChoiceHead()

    def predict(self, source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
        """Yields, per sentence, `choice`, the index of the best ending, and the `probabilities` of all endings.

        Also yields `cut` if a text was truncated. All sentences must have the same number of endings.
        """
        choices = [(sentence, endings) for sentence, *endings in texts]
        examples, lost = encode_endings(choices, None, tokenizer_of(source), source.max_seq_length)
        for scores, count in zip(predictor.predict(ChoiceHead(), source, examples), lost):
            probabilities = metrics.softmax(scores[:, 0]).tolist()
            more = {"cut": True} if count else {}
            yield {"choice": int(scores.argmax()), "probabilities": probabilities, **more}


TASK = Swag()


def _endings(row: Row) -> list[str]:
    beginning = column(row, "sent2")
    return [f"{beginning} {column(row, name)}" for name in ENDINGS]


def _label(row: Row) -> int:
    text = column(row, "label").strip()
    if text not in ("0", "1", "2", "3"):
        raise UserError(f"{row.where}: unknown label {text!r}; expected one of 0, 1, 2, 3")
    return int(text)


def _read(folder: str, name: str, split: str) -> Sequence[Row]:
    """Reads a file, or a split of e.g. "tfds:huggingface:swag/regular", which has the same column names."""
    if folder.startswith(TFDS):
        return read_tfds(folder, split)
    path = epath.Path(folder) / name
    if not path.exists():
        raise missing_file(folder, name)
    return read_table(path)[0]


def encode_endings(
    choices: Sequence[tuple[str, Sequence[str]]],
    labels: np.ndarray | None,
    tokenizer: Tokenizer,
    max_seq_length: int,
) -> tuple[Examples, np.ndarray]:
    """Encodes sentences with endings.

    Args:
      choices: (sentence, endings) of each example, all with the same number of endings.
      labels: the index of the correct ending of each example; None if unknown.
      tokenizer: the tokenizer.
      max_seq_length: the maximum number of tokens of a sequence.

    Returns:
      The examples, and the number of tokens of each example that were cut off, `[examples]`.
    """
    count = len(choices[0][1])
    firsts = [sentence for sentence, _ in choices for _ in range(count)]
    seconds = [ending for _, endings in choices for ending in endings]
    input_ids, token_types, lost = encode_pairs(tokenizer, firsts, seconds, max_seq_length)
    examples = Examples(input_ids, token_types, labels, choices=count)
    return examples, np.reshape(lost, (-1, count)).sum(1)

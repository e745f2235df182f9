"""What a workdir says about its run: `config.json`, the tokenizer, and `report.txt` at the end.

`config.json` is read once, into a `Record`, and two records are compared in one place.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

import ml_collections
from etils import epath

from bertjax.config import UserError, common_config, pretraining_config
from bertjax.files import write_whole
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer

CONFIG, REPORT = "config.json", "report.txt"
# What decides the result of a run; the rest (mesh, logging, remat, ...) may change without a word.
DECISIVE = ("task", "seed", "batch_size", "epochs", "max_seq_length", "stages", "data", "head", "optimizer", "model",
            "init_checkpoint")  # fmt: skip
MODEL_MAY_CHANGE = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


@dataclasses.dataclass(frozen=True)
class Record:
    """What `config.json` says.

    Args:
      config: of the run, locked.
      architecture: of a fine-tuned output layer, the class of transformers; empty otherwise.
      labels: names of the rows of that layer; None: not known yet.
      tokenizer: `kind`, `lowercase` and `fingerprint` of the tokenizer beside it; None: there is none, or it is not
        known yet.
      train_examples: of fine-tuning, which epochs and batch size turn into steps; 0: not known.
    """

    config: ml_collections.ConfigDict
    architecture: str = ""
    labels: tuple[str, ...] | None = None
    tokenizer: dict | None = None
    train_examples: int = 0


class Difference(NamedTuple):
    """A field in which a run would go on otherwise than it was begun; fatal where it cannot."""

    field: str
    old: object
    new: object
    is_fatal: bool

    def __str__(self) -> str:
        return f"{self.field} = {self.new!r} (was {self.old!r})"


def read(workdir: epath.PathLike) -> Record | None:
    """The record of a workdir; None where it has none. Raises `UserError` where it is damaged."""
    path = epath.Path(workdir) / CONFIG
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        beside = {name: content.pop(name) for name in ("architecture", "labels", "train_examples") if name in content}
        used_tokenizer = content.pop("used_tokenizer", None)
        config = (pretraining_config() if content["task"] == "pretraining" else common_config()).unlock()
        if config.task:  # what it was trained with decides, not today's names of the stages
            config.stages = ml_collections.ConfigDict(content.pop("stages"))
        config.update(content)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path}: damaged, or written by another version or program") from None
    if "labels" in beside:
        beside["labels"] = tuple(beside["labels"])
    return Record(config.lock(), tokenizer=used_tokenizer, **beside)


def require(workdir: epath.PathLike) -> Record:
    """The record of a workdir. Raises `UserError` where it has none."""
    record = read(workdir)
    if record is None:
        raise UserError(f"no {epath.Path(workdir) / CONFIG}: {str(workdir)!r} is not the workdir of a run")
    return record


def write(workdir: epath.PathLike, record: Record, pieces: Tokenizer | None) -> None:
    """Writes the record, and beside it the tokenizer, so that the folder alone is enough to use the model."""
    content = json.loads(record.config.to_json_best_effort())
    if record.architecture:
        content |= {"architecture": record.architecture, "labels": list(record.labels or ())}
    if record.train_examples:
        content["train_examples"] = record.train_examples
    if pieces is not None:
        pieces.save(workdir)
        content["used_tokenizer"] = tokenizer_entry(pieces)
    write_whole(epath.Path(workdir) / CONFIG, json.dumps(content, indent=1) + "\n")


def tokenizer_entry(pieces: Tokenizer) -> dict:
    """`Record.tokenizer`."""
    return {"kind": pieces.kind, "lowercase": pieces.lowercase, "fingerprint": pieces.fingerprint}


def load_tokenizer(workdir: epath.PathLike, record: Record) -> Tokenizer | None:
    """The tokenizer of a run; None where it was converted from a checkpoint without one."""
    if record.tokenizer is None:
        return None
    kind = record.tokenizer["kind"]
    return tokenizer.load(kind, epath.Path(workdir) / tokenizer.KINDS[kind].filename, record.tokenizer["lowercase"])


def differences(before: Record, now: Record, identity: Sequence[str] = ()) -> list[Difference]:
    """All decisive fields of `now` that `before` has otherwise; what one of them does not know is not compared.

    `identity`: fields that say which task it is, besides `task`. They, the model, the optimizer's kind, labels and
    tokenizer cannot change within a workdir.
    """
    fixed = {"task", "optimizer.name", *identity}
    old, new = _leaves(before.config), _leaves(now.config)
    found = []
    for field in dict.fromkeys((*new, *old)):
        if old.get(field) != new.get(field):
            is_size = field.startswith("model.") and field.removeprefix("model.") not in MODEL_MAY_CHANGE
            found.append(Difference(field, old.get(field), new.get(field), is_size or field in fixed))
    for field in ("labels", "tokenizer"):
        one, other = getattr(before, field), getattr(now, field)
        if one is not None and other is not None and one != other:
            found.append(Difference(field, one, other, True))
    return found


def refuse(workdir: epath.PathLike, found: Sequence[Difference]) -> None:
    """Raises `UserError` for the first fatal difference."""
    for difference in found:
        if difference.is_fatal:
            raise UserError(_refusal(workdir, difference))


def _refusal(workdir: epath.PathLike, difference: Difference) -> str:
    field, old, new, _ = difference
    if field == "tokenizer":
        return f"{workdir} holds a run with another vocabulary than this; take another --workdir"
    if field == "labels":
        return (
            f"{workdir} holds a run with the labels {', '.join(old[:8])}, but the data has {', '.join(new[:8])}; take "
            f"another --workdir"
        )
    return f"config.{field} = {new!r}: {workdir} holds a run with {old!r}; take another --workdir"


def _leaves(config: ml_collections.ConfigDict) -> dict[str, object]:
    """The decisive fields and their values, as JSON has them."""
    content, leaves = json.loads(config.to_json_best_effort()), {}

    def walk(name: str, value) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                walk(f"{name}.{key}", value[key])
        else:
            leaves[name] = value

    for section in DECISIVE:
        if section in content:
            walk(section, content[section])
    return leaves


def read_report(workdir: epath.PathLike) -> str | None:
    """None where the run has not come to its end."""
    path = epath.Path(workdir) / REPORT
    return path.read_text().rstrip("\n") if path.exists() else None


def write_report(workdir: epath.PathLike, text: str) -> None:
    write_whole(epath.Path(workdir) / REPORT, text + "\n")

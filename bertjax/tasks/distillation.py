"""What a teacher says of the training examples of a task, for a student to learn (Hinton et al. 2015).

It is computed once, without dropout, before training, and kept in the workdir: the logits of an example are a function
of its text, whatever batch it is in.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from etils import epath

from bertjax.config import UserError
from bertjax.data.batches.examples import Examples
from bertjax.files import replacing
from bertjax.interop import pretrained
from bertjax.interop.pretrained import Pretrained
from bertjax.sharding import hosts
from bertjax.tasks import output_layers
from bertjax.tasks.pairs import encode_pairs
from bertjax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bertjax.tasks.finetuning import Dataset

FILE = "teacher_logits.npz"


def taught(config, dataset: "Dataset", tokenizer: Tokenizer, workdir: epath.Path) -> "Dataset":
    """Returns a dataset whose training examples have the logits of the teacher `config.distill.teacher`.

    Raises `UserError` if it has other labels, or cannot read the examples.
    """
    path = workdir / FILE
    with hosts.first_before_others("teacher"):
        if not path.exists():
            each = _logits(config, dataset, tokenizer)
            with replacing(path) as partial, partial.open("wb") as file:
                np.savez(file, logits=np.concatenate(each), sizes=np.array(list(map(len, each))))
        with path.open("rb") as file, np.load(file) as kept:
            each = np.split(kept["logits"], np.cumsum(kept["sizes"])[:-1])
    return dataclasses.replace(dataset, train=dataclasses.replace(dataset.train, teacher_logits=each))


def _logits(config, dataset: "Dataset", tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns the teacher's logits of each training example, in the order of the dataset's labels."""
    teacher, layer = config.distill.teacher, dataset.output_layer
    says = f"config.distill.teacher = {teacher!r}: "
    if layer.architecture not in ("BertForSequenceClassification", "BertForTokenClassification") or layer.frozen:
        raise UserError(f"{says}this task has no classes, numbers or tags that a teacher could tell; leave it out")
    if config.head.get("class_weights"):
        raise UserError(f"{says}does not know the weights of head.class_weights; leave one of them out")
    source = pretrained.read_with_tokenizer(teacher)
    order = _order(source, dataset.labels, says)
    if dataset.texts:
        firsts, *seconds = zip(*dataset.texts)
        ids, types, _ = encode_pairs(source.tokenizer, firsts, seconds[0] if seconds else None, source.max_seq_length)
        examples = Examples(ids, types)
    elif source.tokenizer.fingerprint == tokenizer.fingerprint:
        examples = dataset.train
    else:
        raise UserError(
            f"{says}its tokenizer is another, so that its tags are of other pieces; choose one with the same"
        )
    return [logits[..., order] for logits in output_layers.predict(layer, source, examples)]


def _order(source: Pretrained, labels: tuple[str, ...], says: str) -> list[int]:
    """Returns where a teacher has each label. Raises `UserError` if it has others."""
    if "classifier" not in source.params:
        raise UserError(f"{says}has no classifier; choose a fine-tuned checkpoint")
    rows = source.params["classifier"]["dense"]["bias"].shape[0]
    names = source.label_names(rows) if labels else ()
    if sorted(names) != sorted(labels) or (not labels and rows != 1):
        theirs, ours = (", ".join(each) or "one number" for each in (names or [f"{rows} rows"], labels))
        raise UserError(f"{says}has other labels: {theirs}; the data has {ours}")
    return [names.index(label) for label in labels] or [0]

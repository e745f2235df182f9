"""What a teacher says of the training examples of a task, for a student to learn (Hinton et al. 2015).

It is computed once, without dropout, before training, and kept in the workdir: the logits of an example, or the vectors
of its texts, are a function of these, whatever batch it is in.
"""

import dataclasses
import hashlib
import itertools
import json
from typing import TYPE_CHECKING

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import replacing
from bertjax.common.progress import phase
from bertjax.distributed import hosts
from bertjax.finetuning import targets
from bertjax.inference import losses, output_layers
from bertjax.inference.output_layers import OutputLayer
from bertjax.interop import pretrained
from bertjax.interop.huggingface import MULTI_LABEL
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bertjax.finetuning.task import Dataset

FILE = "teacher_logits.npz"


def taught(config, dataset: "Dataset", tokenizer: Tokenizer, workdir: epath.Path) -> "Dataset":
    """Returns a dataset whose training examples have what the teacher `config.distill.teacher` says of them.

    Raises `UserError` if it has other labels, or cannot read the examples.
    """
    path, key = workdir / FILE, _key(config, dataset, tokenizer)
    with hosts.first_before_others("teacher"):
        if (each := _read(path, key, dataset.forms)) is None:
            phase(f"computing the logits of the teacher {config.distill.teacher}")
            each = _logits(config, dataset, tokenizer)
            with replacing(path) as partial, partial.open("wb") as file:
                sizes, forms = np.array(list(map(len, each))), np.array(dataset.forms, str)
                np.savez(file, logits=np.concatenate(each), sizes=sizes, key=np.array(key), forms=forms)
    ends = np.cumsum(list(map(len, dataset.sets)))
    train, *others = (
        dataclasses.replace(examples, teacher_logits=each[end - len(examples) : end])
        for examples, end in zip(dataset.sets, ends)
    )
    others = tuple(share._replace(examples=examples) for share, examples in zip(dataset.others, others))
    return dataclasses.replace(dataset, train=train, others=others)


def _key(config, dataset: "Dataset", tokenizer: Tokenizer) -> str:
    """A hash that changes if the logits may become others: of the teacher's path, the examples and their labels."""
    of_all = [config.distill.teacher, dataset.labels, tokenizer.fingerprint]
    of_all += [config.distill.what] if "what" in config.distill else []
    content = hashlib.sha256(json.dumps(of_all).encode())
    for ids in itertools.chain.from_iterable(examples.input_ids for examples in dataset.sets):
        content.update(np.int32(len(ids)).tobytes() + ids.tobytes())
    return content.hexdigest()


def _read(path: epath.Path, key: str, forms: tuple[str, ...]) -> list[np.ndarray] | None:
    """Returns the logits of each example in a file if the file has this key and these forms.

    The forms are not part of the key: a file of an older version has none, and its teacher may be gone.
    """
    if not path.exists():
        return None
    with path.open("rb") as file, np.load(file) as kept:
        if str(kept["key"]) != key or ("forms" in kept and tuple(kept["forms"].tolist()) != forms):
            return None
        return np.split(kept["logits"], np.cumsum(kept["sizes"])[:-1])


def _logits(config, dataset: "Dataset", tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns what the teacher says of each training example: logits in the order of the dataset's labels."""
    teacher, layer = config.distill.teacher, dataset.output_layer
    if dataset.taught:
        return dataset.taught(pretrained.read_with_tokenizer(teacher))
    says = f"config.distill.teacher = {teacher!r}: "
    if layer.architecture not in ("BertForSequenceClassification", "BertForTokenClassification") or layer.frozen:
        raise UserError(f"{says}this task has no classes, numbers or tags that a teacher could tell; leave it out")
    source = pretrained.read_with_tokenizer(teacher)
    order = _order(source, layer, dataset.labels, says)
    if dataset.texts:
        from bertjax.finetuning import classification  # which imports this module

        each, _ = classification.logits_of(source, layer, dataset.texts)
    else:
        each = _same_tokens(source, layer, dataset, tokenizer, config)
    if not dataset.labels:  # A student of numbers learns the teacher's numbers, not its logits.
        number = targets.of_checkpoint(source)
        return [number.predictions(np.empty(0), logits[None]) for logits in each]
    return [logits[..., order] for logits in each]


def _same_tokens(
    source: Pretrained, layer: OutputLayer, dataset: "Dataset", tokenizer: Tokenizer, config
) -> list[np.ndarray]:
    """Returns the teacher's logits of examples that are parts of texts. The teacher must have the same tokenizer."""
    says = f"config.distill.teacher = {config.distill.teacher!r}: "
    if source.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{says}its tokenizer is another, so that its tags, or windows, would be of other pieces")
    if layer.architecture == "BertForTokenClassification":
        from bertjax.finetuning.tasks import ner  # which imports this module

        ner.check_teacher(source, config)
    if (longest := dataset.train.lengths.max()) > (most := source.config.max_position_embeddings):
        raise UserError(f"{says}has {most} positions, but an example has {longest} tokens; set max_seq_length={most}")
    return output_layers.predict(layer, source, dataset.train)


def _order(source: Pretrained, layer: OutputLayer, labels: tuple[str, ...], says: str) -> list[int]:
    """Returns where a teacher has each label. Raises `UserError` if it has others, or tells something else."""
    if "classifier" not in source.params:
        raise UserError(f"{says}has no classifier; choose a fine-tuned checkpoint")
    own = {"lstm_size", "lstm_layers", *losses.SETTINGS}
    is_several = source.is_multi_label, layer.problem_type == MULTI_LABEL
    if source.architecture != layer.architecture or is_several[0] != is_several[1] or source.head.keys() - own:
        what = source.problem_type or source.architecture
        raise UserError(f"{says}is of another kind of task ({what}); choose one that was fine-tuned as this model is")
    rows = source.params["classifier"]["dense"]["bias"].shape[0]
    names = source.label_names(rows) if labels else ()
    if sorted(names) != sorted(labels) or (not labels and rows != 1):
        theirs, ours = (", ".join(each) or "one number" for each in (names or [f"{rows} rows"], labels))
        raise UserError(f"{says}has other labels: {theirs}; the data has {ours}")
    return [names.index(label) for label in labels] or [0]

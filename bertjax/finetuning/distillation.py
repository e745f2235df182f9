"""The targets of a teacher for the training examples of a task (Hinton et al. 2015).

The targets are computed once, before training and without dropout, and are stored in the workdir. This is possible
because the logits of an example, or the embeddings of its texts, do not depend on the batch.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import replacing
from bertjax.common.progress import phase
from bertjax.data.loading.examples import Examples
from bertjax.distributed import hosts
from bertjax.finetuning.classification import logits_of
from bertjax.finetuning.labels import label_type_of
from bertjax.finetuning.tagging import check_teacher
from bertjax.inference import losses, predictor
from bertjax.inference.heads import Head
from bertjax.inference.task import HasTeacherTargets, TaskData
from bertjax.interop import pretrained
from bertjax.interop.cross_encoder import query_prompt_of
from bertjax.interop.huggingface import MULTI_LABEL
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.text.tokenizer import Tokenizer

FILE = "teacher_logits.npz"


def with_teacher_targets(config: ConfigDict, data: TaskData, tokenizer: Tokenizer, workdir: epath.Path) -> TaskData:
    """Returns data whose training examples have the targets of the teacher `config.distill.teacher`.

    Raises:
      UserError: if the teacher has other labels, or cannot read the examples.
    """
    fields = [config.distill.teacher, data.labels, tokenizer.fingerprint]
    fields += [config.distill.what] if "what" in config.distill else []
    targets = stored_outputs(
        workdir / FILE,
        fields,
        data.train_sets,
        data.forms,
        f"the logits of the teacher {config.distill.teacher}",
        lambda: _teacher_targets(config, data, tokenizer),
    )
    ends = np.cumsum(list(map(len, data.train_sets)))
    train, *more = (
        examples.with_teacher(targets[end - len(examples) : end]) for examples, end in zip(data.train_sets, ends)
    )
    more_train = tuple(share._replace(examples=examples) for share, examples in zip(data.more_train, more))
    return dataclasses.replace(data, train=train, more_train=more_train)


def stored_outputs(
    path: epath.Path,
    fields: Sequence[Any],
    train_sets: Sequence[Examples],
    forms: tuple[str, ...],
    description: str,
    compute: Callable[[], list[np.ndarray]],
) -> list[np.ndarray]:
    """Returns the outputs of another checkpoint for each training example, which are computed once and stored.

    Args:
      path: the file of the outputs.
      fields: the inputs of the outputs besides the examples, such as the path of the checkpoint.
      train_sets: the training examples.
      forms: `TaskData.forms` of the examples.
      description: the name of the outputs, for a line on the terminal.
      compute: () -> the outputs.
    """
    key = _key(fields, train_sets)
    with hosts.first_before_others("teacher"):
        if (outputs := _read(path, key, forms)) is None:
            phase(f"computing {description}")
            outputs = compute()
            with replacing(path) as partial, partial.open("wb") as file:
                sizes = np.array(list(map(len, outputs)))
                np.savez(
                    file, logits=np.concatenate(outputs), sizes=sizes, key=np.array(key), forms=np.array(forms, str)
                )
    return outputs


def _key(fields: Sequence[Any], train_sets: Sequence[Examples]) -> str:
    """Returns a hash of some fields and the tokens of the examples."""
    content = hashlib.sha256(json.dumps(fields).encode())
    for ids in itertools.chain.from_iterable(examples.identifying_arrays() for examples in train_sets):
        content.update(np.int32(len(ids)).tobytes() + ids.tobytes())
    return content.hexdigest()


def _read(path: epath.Path, key: str, forms: tuple[str, ...]) -> list[np.ndarray] | None:
    """Returns the targets of each example in a file if the file has this key and these forms.

    The forms (`TaskData.forms`) are not part of the key, because a file of an older version has no forms. The targets
    in such a file must stay valid, because the teacher may have been deleted.
    """
    if not path.exists():
        return None
    with path.open("rb") as file, np.load(file) as stored:
        if str(stored["key"]) != key or ("forms" in stored and tuple(stored["forms"].tolist()) != forms):
            return None
        return np.split(stored["logits"], np.cumsum(stored["sizes"])[:-1])


def _teacher_targets(config: ConfigDict, data: TaskData, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns the teacher's targets of each training example: logits in the order of the labels of the data."""
    teacher, head = config.distill.teacher, data.head
    if isinstance(data, HasTeacherTargets):
        return data.teacher_targets(pretrained.read_with_tokenizer(teacher))
    field = f"config.distill.teacher = {teacher!r}: "
    if head.architecture not in ("BertForSequenceClassification", "BertForTokenClassification") or head.frozen:
        raise UserError(f"{field}this task has no classes, numbers or tags for a teacher; leave the teacher out")
    source = pretrained.read_with_tokenizer(teacher)
    order = _order(source, head, data.labels, field)
    if data.texts:
        logits, _ = logits_of(source, head, data.texts)
    else:
        logits = _logits_of_same_tokens(source, data, tokenizer, config)
    if not data.labels:  # The targets of a regression are the predicted numbers of the teacher.
        label_type = label_type_of(source)
        return [label_type.predictions(row[None]) for row in logits]
    return [row[..., order] for row in logits]


def _logits_of_same_tokens(
    source: Pretrained, data: TaskData, tokenizer: Tokenizer, config: ConfigDict
) -> list[np.ndarray]:
    """Returns the teacher's logits of examples that are not whole texts. The teacher must have the same tokenizer."""
    field = f"config.distill.teacher = {config.distill.teacher!r}: "
    if tokenizer_of(source).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{field}has another tokenizer than this model, so that tags or windows differ; choose another teacher"
        )
    if prompt := query_prompt_of(source.settings):
        raise UserError(
            f"{field}has the default prompt {prompt!r}, which windows of texts cannot contain; set data.windows='', or "
            f"choose another teacher"
        )
    if data.head.architecture == "BertForTokenClassification":
        check_teacher(source, config)
    if (longest := data.train.lengths.max()) > (most := source.config.max_position_embeddings):
        raise UserError(f"{field}has {most} positions, but an example has {longest} tokens; set max_seq_length={most}")
    return predictor.predict(data.head, source, data.train)


def _order(source: Pretrained, head: Head, labels: Sequence[str], field: str) -> list[int]:
    """Returns the index of each label in the teacher's logits. Raises `UserError` for a teacher of another task."""
    if "classifier" not in source.params:
        raise UserError(f"{field}has no classifier; choose a fine-tuned checkpoint")
    allowed_settings = {"lstm_size", "lstm_layers", *losses.SETTINGS}
    same_type = source.is_multi_label == (head.problem_type == MULTI_LABEL)
    if source.architecture != head.architecture or not same_type or source.head.keys() - allowed_settings:
        kind = source.problem_type or source.architecture
        raise UserError(
            f"{field}was fine-tuned for another type of task ({kind}); choose a teacher of this type of task"
        )
    rows = source.params["classifier"]["dense"]["bias"].shape[0]
    names = source.label_names(rows) if labels else ()
    if sorted(names) != sorted(labels) or (not labels and rows != 1):
        teacher_labels, data_labels = (", ".join(x) or "one number" for x in (names or [f"{rows} rows"], labels))
        raise UserError(
            f"{field}has the labels {teacher_labels}, but the data has {data_labels}; choose another teacher"
        )
    return [names.index(label) for label in labels] or [0]

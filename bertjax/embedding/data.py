"""Reads the training sets and the dev set of embeddings, and computes the targets of a teacher."""

import dataclasses
import itertools
from collections.abc import Collection, Sequence

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.data.corpus import holdout
from bertjax.data.loading.mixture import WeightedExamples, tempered_steps
from bertjax.embedding import datasets
from bertjax.embedding.datasets import (
    TEMPERATURE,
    TOKENS,
    WEIGHTS,
    EncodedTexts,
    Prompts,
    Source,
    dev_set,
    training_sets,
)
from bertjax.embedding.evaluators import make_split
from bertjax.embedding.forms import FORMS, WITH_QUERIES, TextSet
from bertjax.embedding.head import EmbeddingHead, prompts_of, similarity_of, width_of, widths_of_loss
from bertjax.embedding.retrieval import Search
from bertjax.embedding.teacher_targets import LISTS, TARGETS, VECTORS, margins
from bertjax.finetuning import distillation
from bertjax.finetuning.contamination import seen_in_training
from bertjax.finetuning.table_summary import TableSummary
from bertjax.inference import predictor
from bertjax.inference.task import HasGuide, HasTeacherTargets, TaskData
from bertjax.interop import pretrained
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.interop.sentence_transformers import ARCHITECTURE, SETTINGS
from bertjax.text.tokenizer import Tokenizer

GUIDE_FILE = "guide_embeddings.npz"
TEACHER_EXAMPLES = 1024  # examples whose teacher scores are computed at once
TO_COSINES = "losses compare embeddings by cosines; set 'cosine' in a copy of the folder"


@dataclasses.dataclass(frozen=True)
class EmbeddingData(TaskData, HasTeacherTargets, HasGuide):
    """The data of embeddings.

    Attributes:
      config: the config of the run.
      text_sets: each training set, and the name of its form; empty without a teacher and a guide, because a set holds
        all texts.
    """

    config: ConfigDict = dataclasses.field(default_factory=ConfigDict)
    text_sets: Sequence[tuple[TextSet, str]] = ()

    def steps_of_sets(self, batch_size: int) -> list[int]:
        """Returns the number of steps of an epoch on each of `train_sets`, by `data.sampling`."""
        data = self.config.data
        if (sampling := data.get("sampling", WEIGHTS)) == WEIGHTS:
            return super().steps_of_sets(batch_size)
        temperature = data.temperature if sampling == TEMPERATURE else 1.0
        return tempered_steps(list(map(len, self.train_sets)), temperature, batch_size)

    def teacher_targets(self, teacher: Pretrained) -> list[np.ndarray]:
        """Returns the teacher's embeddings of the texts of each example, or scores of the example (`distill.what`).

        The teacher reads the texts with its own tokenizer and prompts.

        Raises:
          UserError: if the teacher computes no embeddings, or embeddings of another width.
        """
        distill = self.config.distill
        field = f"config.distill.teacher = {distill.teacher!r}: "
        _require_embeddings(field, teacher)
        if (similarity := similarity_of(teacher.settings)) != "cosine":
            raise UserError(
                f"{field}{SETTINGS}: similarity_fn_name {similarity!r} is not supported in a teacher; {TO_COSINES}"
            )
        targets: list[np.ndarray] = []
        for text_set, form in self.text_sets:
            embeddings, all_numbers = _embed_set(teacher, text_set, form)
            student_width = width_of(self.config.head, self.config.model)
            if distill.what == VECTORS and (width := embeddings.shape[-1]) != student_width:
                raise UserError(
                    f"{field}the width of the embeddings is {width}, but the width of this model's embeddings is "
                    f"{student_width}; set head.dense={width}, or distill.what=scores"
                )
            target = TARGETS[distill.what]
            for numbers in np.array_split(all_numbers, len(all_numbers) // TEACHER_EXAMPLES + 1):
                targets.extend(np.asarray(target(embeddings[numbers])))
        return targets

    def with_guide(self, tokenizer: Tokenizer, workdir: epath.Path) -> TaskData:
        """Returns the data whose examples of texts have the embeddings of `loss.guide`."""
        if not (guide := self.config.loss.get("guide", "")):
            return self
        guided = [number for number, form in enumerate(self.forms) if FORMS[form].value_type is None]

        def embeddings_of_examples() -> list[np.ndarray]:
            source = pretrained.read_with_tokenizer(guide)
            _require_embeddings(f"config.loss.guide = {guide!r}: ", source)
            sets = (_embed_set(source, *self.text_sets[number]) for number in guided)
            return [embeddings[numbers] for embeddings, all_numbers in sets for numbers in all_numbers]

        sets = list(self.train_sets)
        outputs = distillation.stored_outputs(
            workdir / GUIDE_FILE,
            [guide, tokenizer.fingerprint],
            [sets[number] for number in guided],
            tuple(self.forms[number] for number in guided),
            f"the embeddings of the guide {guide}",
            embeddings_of_examples,
        )
        start = 0
        for number in guided:
            end = start + len(sets[number])
            sets[number], start = dataclasses.replace(sets[number], guide_embeddings=outputs[start:end]), end
        train, *more = sets
        more_train = tuple(share._replace(examples=examples) for share, examples in zip(self.more_train, more))
        return dataclasses.replace(self, train=train, more_train=more_train)


def _require_embeddings(field: str, source: Pretrained) -> None:
    """Raises `UserError` about a field unless a checkpoint computes embeddings."""
    if source.architecture != ARCHITECTURE:
        head = source.architecture or "no head"
        raise UserError(
            f"{field}computes no embeddings ({head}); choose a run of embed, or a sentence-transformers folder"
        )


def _embed_set(source: Pretrained, text_set: TextSet, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the embeddings of the distinct texts of a set, and the numbers of the texts of each example.

    The checkpoint reads the texts with its own tokenizer and prompts.
    """
    prompts, tokenizer = prompts_of(source.settings), tokenizer_of(source)
    encoded = datasets.encode_set(text_set, form, prompts, tokenizer, source.max_seq_length)
    return np.stack(predictor.predict(EmbeddingHead(), source, encoded.examples)), encoded.numbers


def load_sets(config: ConfigDict, tokenizer: Tokenizer) -> EmbeddingData:
    """Reads the training sets and the dev set. Raises `UserError` for missing or invalid files."""
    data, notes = config.data, []
    prompts, settings = prompts_of(config), (tokenizer, config.max_seq_length)
    examples, text_sets, dev = [], [], dev_set(data)
    held_out: frozenset[str] = frozenset()
    is_file = epath.Path(data.path).is_file()
    if "path" in dev.inherited and is_file and not is_divided(data):
        differs = "data.dev has another form or another first column than data"
        raise UserError(f"config.data.dev.path = '': {differs}; name the file of the dev set, or leave data.dev out")
    for name, source in training_sets(data).items():
        text_set = datasets.read_set(source, "train")
        if not name and is_file and is_divided(data):
            held_out, note = held_out_texts(data, text_set)
            notes.append(note)
            text_set = datasets.part(text_set, held_out, is_inside=False)
        source.require(
            len(text_set.texts) > 1, "path", "has one example, expected at least 2, because the loss compares examples"
        )
        encoded = datasets.encode_set(text_set, source.form, source.prompts(prompts), *settings)
        train = datasets.training_examples(encoded, text_set.labels, equal_tokens=config.get("batch_by") == TOKENS)
        if text_set.scores is not None:
            scores = text_set.scores if config.distill.what == LISTS else margins(text_set.scores)
            train = dataclasses.replace(train, teacher_logits=list(scores))
        examples.append(WeightedExamples(train, source.weight))
        text_sets.append((text_set, source.form))
        notes += describe_set(name or "training", text_set, encoded, *settings)
    dev_texts, encoded = read_evaluated(dev, ["dev"], held_out, prompts, *settings)
    notes += describe_set("dev", dev_texts, encoded, *settings)
    trained = itertools.chain.from_iterable(text_set.texts for text_set, _ in text_sets)
    notes += seen_in_training(trained, ("dev examples", dev_texts.texts))
    split = make_split(dev_texts, encoded, widths_of_loss(config, width_of(config.head, config.model)))
    first, *more_train = examples
    return EmbeddingData(
        EmbeddingHead(),
        (),
        first.examples,
        (split,),
        split.metric,
        tuple(notes),
        more_train=tuple(more_train),
        forms=tuple(form for _, form in text_sets),
        config=config,
        text_sets=tuple(text_sets) if config.distill.teacher or config.loss.get("guide") else (),
    )


def is_divided(data: ConfigDict) -> bool:
    """Returns whether the dev set is a held-out tenth of the training set, if the training set is one file.

    This is the case if `data.dev` names no other file, and has the form and the first column of the training set.
    """
    train, dev = training_sets(data)[""], dev_set(data)
    return "path" in dev.inherited and (dev.form, dev.columns[:1]) == (train.form, train.columns[:1])


def held_out_texts(data: ConfigDict, text_set: TextSet) -> tuple[frozenset[str], str]:
    """Returns the first texts of the held-out examples of a set, and the line that states the split.

    Raises:
      UserError: if the file has too few examples.
    """
    unit, value_type = "queries" if data.form in WITH_QUERIES else "texts", FORMS[data.form].value_type
    labels: dict[str, set] = {}  # {first text: the labels of its examples}; scores are not labels
    has_labels = value_type is np.int32
    values = text_set.values.tolist() if text_set.values is not None and has_labels else itertools.repeat(None)
    for (first, *_), value in zip(text_set.texts, values):
        labels.setdefault(first, set()).add(value)
    firsts = list(labels)
    groups = [sorted(text_labels) if has_labels else () for text_labels in labels.values()]
    chosen = holdout.choose_heldout(groups, holdout.seed_of(data))
    least = holdout.MIN_FOR_CORRELATION if value_type is np.float32 else 1
    holdout.require_heldout(len(chosen), len(firsts), data, unit, least)
    held_out = frozenset(firsts[number] for number in chosen)
    dev = datasets.part(text_set, held_out)
    if dev.values is not None and (dev.values == dev.values[0]).all():
        raise UserError(
            f"config.data.path = {data.path!r}: all {len(dev.texts)} held-out examples have {data.label} = "
            f"{dev.values[0]:g}, which allow no evaluation; name a dev set with config.data.dev.path"
        )
    line = holdout.describe_split(len(chosen), len(firsts), data, unit, data.label if has_labels else "")
    return held_out, f"{line}, with {len(text_set.texts) - len(dev.texts):,} and {len(dev.texts):,} examples"


def read_evaluated(
    source: Source,
    parts: Sequence[str],
    held_out: Collection[str],
    prompts: Prompts,
    tokenizer: Tokenizer,
    max_seq_length: int,
) -> tuple[TextSet | Search, EncodedTexts]:
    """Reads and encodes a set that embeddings are evaluated on.

    If `held_out` is not empty, the result contains only the examples whose first texts are in `held_out`.
    """
    if source.form in WITH_QUERIES:
        search = datasets.read_search(source, *parts, held_out=held_out)
        return search, datasets.encode_search(search, prompts, tokenizer, max_seq_length)
    text_set = datasets.read_set(source, *parts)
    text_set = datasets.part(text_set, held_out) if held_out else text_set
    return text_set, datasets.encode_set(text_set, source.form, prompts, tokenizer, max_seq_length)


def describe_set(
    name: str, texts: TextSet | Search, encoded: EncodedTexts, tokenizer: Tokenizer, max_seq_length: int
) -> list[str]:
    """Returns the lines to print about a set."""
    rows, used, skipped = (
        ("queries", len(texts.queries), {})
        if isinstance(texts, Search)
        else ("examples", len(texts.texts), texts.skipped)
    )
    summary = TableSummary(name, used, encoded.examples, tokenizer, rows, "texts", skipped, lost=encoded.lost)
    return [f"{texts.describe(name)}: {len(encoded.examples)} texts", *summary.lines(max_seq_length)]

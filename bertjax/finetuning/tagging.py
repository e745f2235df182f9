"""Tagging of words, such as named entities (Devlin et al. 2019, section 5.3), shared by the tagging tasks."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.limits import one_of
from bertjax.finetuning import metrics, word_encoding
from bertjax.finetuning.conll import Sentence, is_bio
from bertjax.finetuning.contamination import seen_in_training
from bertjax.finetuning.table_summary import TableSummary
from bertjax.inference import predictor
from bertjax.inference.heads import Head, TaggingHead
from bertjax.inference.task import FineTuningTask, InputForm, ReadsLabelledFiles, Split, TaskData
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.words import JOINS, TEXT, join_of
from bertjax.training.checkpoints import workdir


@dataclasses.dataclass(frozen=True)
class TaggedSentences(Split):
    """Sentences of tagged words, encoded as `examples`.

    Attributes:
      sentences: the sentences.
      labels: the tags that the model predicts.
    """

    sentences: Sequence[Sentence]
    labels: Sequence[str]

    @property
    def has_entities(self) -> bool:
        """Whether all tags are BIO. The metric is then the F1 of entities, else the accuracy of words."""
        return all(map(is_bio, self.labels))

    def decode(self, outputs: list[np.ndarray]) -> list[list[str]]:
        """Returns the most likely tags of the words of each sentence."""
        return word_encoding.read_tags(self.sentences, self.labels, self.examples, outputs)

    def score(self, predictions: list[list[str]]) -> dict[str, float]:
        """Returns the scores of the tags of each sentence."""
        gold = [list(sentence.tags) for sentence in self.sentences]
        if self.has_entities:
            scores_by_type = metrics.entity_scores_by_type(gold, predictions)
            f1_by_type = {f"f1_{name}": scores["f1"] for name, scores in scores_by_type.items()}
            return metrics.entity_scores(gold, predictions) | f1_by_type
        return {"accuracy": metrics.accuracy(np.concatenate(gold), np.concatenate(predictions))}

    def files(self, predictions: list[list[str]]) -> dict[str, str]:
        """Returns the file with a few sentences, their tags and the predicted tags."""
        rows = []
        for number in workdir.sample_indices(len(self.sentences)):
            sentence = self.sentences[number]
            tags, predicted = (self._text(sentence.words, tags) for tags in (sentence.tags, predictions[number]))
            rows.append((" ".join(sentence.words), tags, predicted))
        return workdir.samples_file(rows)

    def _text(self, words: Sequence[str], tags: Sequence[str]) -> str:
        """Returns the entities of a sentence, or its words with their tags, as text."""
        if not self.has_entities:
            return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags))
        entities = (f"{name}: {' '.join(words[first:end])}" for name, first, end in metrics.entities(tags))
        return "; ".join(entities) or "none"


def make_tagging_data(
    train: Sequence[Sentence],
    dev: Sequence[Sentence],
    labels: tuple[str, ...],
    head: Head,
    tokenizer: Tokenizer,
    max_seq_length: int,
    with_context: bool,
    join: str = TEXT,
) -> TaskData:
    """Encodes tagged sentences. The metric is entity F1 if all tags are BIO, otherwise the word accuracy."""
    examples, dev_examples = (
        word_encoding.encode_word_sequences(sentences, labels, tokenizer, max_seq_length, with_context, join)
        for sentences in (train, dev)
    )
    dev_split = TaggedSentences(dev_examples, dev, labels)
    words = sum(len(sentence.words) for sentence in train)
    notes = [
        f"{len(train)} training sentences, {words} words, {len(labels)} tags, in {len(examples)} sequences; "
        f"{len(dev)} dev sentences in {len(dev_examples)}"
    ]
    for name, sentences, encoded in (("training", train, examples), ("dev", dev, dev_examples)):
        notes += TableSummary(name, len(sentences), encoded, tokenizer, rows="sentences").lines(max_seq_length)
    notes += seen_in_training((s.words for s in train), ("dev sentences", (s.words for s in dev)))
    notes += _unread(examples.unread + dev_examples.unread)
    tags = Counter(tag for sentence in dev for tag in sentence.tags)
    has_entities = dev_split.has_entities
    return TaskData(
        head,
        labels,
        examples,
        (dev_split,),
        "f1" if has_entities else "accuracy",
        tuple(notes),
        baseline=0.0 if has_entities else max(tags.values()) / tags.total(),
        more_metrics=("precision", "recall") if has_entities else (),
    )


class TaggingTask(FineTuningTask, ReadsLabelledFiles):
    """The shared parts of the tasks that tag words."""

    architecture = "BertForTokenClassification"
    inputs = InputForm(range(1, 2), "texts")
    method = "tag"
    identity: ClassVar[tuple[str, ...]] = ("data.join",)

    def head_for(self, labels: int) -> Head:
        """Returns the head for a number of labels."""
        return TaggingHead(labels)

    def head(self, source: Pretrained) -> Head:
        """Returns the head of a checkpoint."""
        return self.head_for(len(source.params["classifier"]["dense"]["bias"]))

    def validate(self, config: ConfigDict) -> None:
        """Raises `UserError` for an unknown way to join words."""
        if "join" in config.data:
            one_of(config, "data.join", JOINS)

    def adopt(self, config: ConfigDict, settings: ConfigDict) -> list[str]:
        """Takes `data.join` of an earlier run, unless the user has set the field; returns the change."""
        if "join" not in config.data or "data.join" in config.get("overrides", ()):
            return []
        if (join := join_of(settings)) == config.data.join:
            return []
        config.data.join = join
        return [f"data.join = {join!r}"]

    def predict(self, source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
        """Yields the `words`, `tags` and `offsets` (start, end) of each text, and `entities` if the tags are BIO.

        `split_words` finds the words. The offsets are in characters. Words that the tokenizer drops, such as control
        characters, are left out.
        """
        labels = source.label_names(len(source.params["classifier"]["dense"]["bias"]))
        join, plain_texts = join_of(source.settings), [text for (text,) in texts]
        sentences, places, examples = word_encoding.encode_text(
            plain_texts, labels, tokenizer_of(source), source.max_seq_length, join
        )
        logits = predictor.predict(self.head(source), source, examples)
        split = TaggedSentences(examples, sentences, labels)
        for text, sentence, offsets, tags in zip(plain_texts, sentences, places, split.decode(logits)):
            result: dict = {"words": list(sentence.words), "tags": tags, "offsets": [list(place) for place in offsets]}
            if split.has_entities:
                spans = [(name, offsets[first][0], offsets[end - 1][1]) for name, first, end in metrics.entities(tags)]
                result["entities"] = [
                    {"type": name, "text": text[start:end], "start": start, "end": end} for name, start, end in spans
                ]
            yield result

    def labelled_sentences(
        self, source: Pretrained, sentences: Sequence[Sentence], with_context: bool = False, note: str = ""
    ) -> TaggedSentences:
        """Returns encoded sentences, for scoring a checkpoint.

        Args:
          source: the checkpoint.
          sentences: the sentences.
          with_context: whether neighbouring sentences of a document share a sequence.
          note: a line to print before the summary of the sentences.
        """
        labels, tokenizer, join = source.labels, tokenizer_of(source), join_of(source.settings)
        examples = word_encoding.encode_word_sequences(
            sentences, labels, tokenizer, source.max_seq_length, with_context, join
        )
        summary = TableSummary("labelled", len(sentences), examples, tokenizer, rows="sentences")
        lines = [note, *summary.lines(source.max_seq_length), *_unread(examples.unread)]
        return TaggedSentences(examples, sentences, labels, note="\n".join(filter(None, lines)))


def check_teacher(source: Pretrained, config: ConfigDict) -> None:
    """Raises `UserError` if a teacher was trained on words that were joined in another way than the words of a run."""
    join, teacher_join = join_of(config), join_of(source.settings)
    if tokenizer_of(source).space and "join" in config.data and join != teacher_join:
        raise UserError(
            f"config.data.join = {join!r}: the teacher {source.path} was trained with {teacher_join!r}; set "
            f"--config.data.join={teacher_join}"
        )


def _unread(count: int) -> list[str]:
    """Returns a line about words that the model does not read in full, if there are such words."""
    return [f"{count} words truncated or replaced by [UNK]: they have too many tokens, or none"] if count else []

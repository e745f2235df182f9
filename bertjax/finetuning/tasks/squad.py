"""SQuAD 1.1 and 2.0: answers to questions as spans of a paragraph (Devlin et al. 2019, sections 4.2 and 4.3)."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.limits import at_least_one, one_of, require
from bertjax.data.corpus.tables import TFDS
from bertjax.finetuning import metrics, question_windows, squad_files
from bertjax.finetuning.contamination import seen_in_training
from bertjax.finetuning.question_windows import Window, WindowSizes
from bertjax.finetuning.squad_files import Question
from bertjax.finetuning.table_summary import TableSummary
from bertjax.inference import predictor
from bertjax.inference.heads import Head, SpanHead
from bertjax.inference.task import FineTuningTask, HasSubmission, InputForm, ReadsLabelledFiles, Split, TaskData
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints import workdir

VERSIONS = ("v1.1", "v2.0")
THRESHOLD = "null_threshold"  # null odds above which the answer is empty, tuned on the dev set of v2.0


class Answers(NamedTuple):
    """The answers to questions.

    Attributes:
      candidates: for each question, the result of `question_windows.answers`.
      texts: the final answer to each question; "" for no answer.
      threshold: the null odds above which there is no answer, in v2.0.
    """

    candidates: dict[str, tuple[list[dict], float]]
    texts: dict[str, str]
    threshold: float | None


@dataclasses.dataclass(frozen=True)
class Questions(Split):
    """Questions, encoded with the windows of their paragraphs.

    Attributes:
      questions: the questions.
      windows: the window of each example.
      version: the version of SQuAD: v2.0 has questions without an answer.
      threshold: the null odds above which there is no answer in v2.0; None to tune the threshold on these questions.
    """

    questions: Sequence[Question]
    windows: Sequence[Window]
    version: str
    threshold: float | None = None

    def decode(self, outputs: list[np.ndarray]) -> Answers:
        """Returns the answers to the questions from the logits of the windows."""
        candidates = question_windows.answers(self.questions, self.windows, outputs)
        texts = {name: best[0]["text"] if best else "" for name, (best, _) in candidates.items()}
        if self.version != "v2.0":
            return Answers(candidates, texts, None)
        odds, threshold = {name: null for name, (_, null) in candidates.items()}, self.threshold
        if threshold is None:
            threshold = metrics.best_null_threshold(self._gold_answers(), texts, odds)[0]
        texts = {name: "" if odds[name] > threshold else text for name, text in texts.items()}
        return Answers(candidates, texts, threshold)

    def score(self, predictions: Answers) -> dict[str, float]:
        """Returns SQuAD's scores of answers."""
        scores = metrics.squad_scores(self._gold_answers(), predictions.texts, self.version)
        return {name: value / 100 for name, value in scores.items()}

    def decide(self, predictions: Answers) -> dict[str, float]:
        """Returns the threshold of v2.0."""
        return {} if predictions.threshold is None else {THRESHOLD: predictions.threshold}

    def files(self, predictions: Answers) -> dict[str, str]:
        """Returns the files of run_squad.py, and the file with a few questions and answers."""
        candidates = predictions.candidates.items()
        written: dict[str, Any] = {"predictions.json": predictions.texts}
        written["nbest_predictions.json"] = {name: best for name, (best, _) in candidates}
        if predictions.threshold is not None:
            written["null_odds.json"] = {name: null for name, (_, null) in candidates}
        rows = []
        for question in (self.questions[number] for number in workdir.sample_indices(len(self.questions))):
            right = "; ".join(dict.fromkeys(question.answers))
            rows.append((question.text, right or "no answer", predictions.texts[question.name] or "no answer"))
        texts = {name: json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in written.items()}
        return texts | workdir.samples_file(rows)

    def _gold_answers(self) -> dict[str, Sequence[str]]:
        return {question.name: question.answers for question in self.questions}


class Squad(FineTuningTask, HasSubmission, ReadsLabelledFiles):
    """Answers to questions as spans of a paragraph."""

    architecture = "BertForQuestionAnswering"
    inputs = InputForm(range(2, 3), '"question ||| paragraph"')
    method = "answer"
    identity = ("data.version",)

    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads train-v*.json and dev-v*.json of the folder, or the splits of TFDS.

        Raises:
          UserError: for missing or invalid files.
        """
        data, sizes = config.data, WindowSizes.from_config(config)
        if data.path.startswith(TFDS):
            train, dev = (squad_files.read_tfds_squad(data.path, split) for split in ("train", "validation"))
        else:
            paths = (squad_files.find_squad_file(data.path, name, data.version) for name in ("train", "dev"))
            train, dev = map(squad_files.read_squad, paths)
        count = len(train)
        train, notes = squad_files.well_placed(data, train, dev)
        if data.version == "v1.1" and not all(question.answers for question in (*train, *dev)):
            raise UserError("config.data.version = 'v1.1': the data has questions without an answer; use squad.py:v2.0")
        encoded = question_windows.encode_question_windows(train, tokenizer, sizes, with_labels=True)
        dev_encoded = question_windows.encode_question_windows(dev, tokenizer, sizes, with_labels=False)
        notes += encoded.notes(train, data.max_query_length)
        if dev_encoded.cut:
            notes += (f"{dev_encoded.cut} dev questions truncated to {data.max_query_length} tokens",)
        skipped = {"with an answer that is not at its answer_start": count - len(train)}
        for name, questions, examples, left_out in (
            ("training", train, encoded.examples, skipped),
            ("dev", dev, dev_encoded.examples, {}),
        ):
            summary = TableSummary(
                name, len(questions), examples, tokenizer, rows="questions", skipped=left_out, parts=2
            )
            notes += tuple(summary.lines(config.max_seq_length))
        asked, asked_in_dev = ([(question.text, question.context) for question in side] for side in (train, dev))
        notes += tuple(seen_in_training(asked, ("dev questions", asked_in_dev)))
        split = Questions(dev_encoded.examples, dev, dev_encoded.windows, data.version)
        unanswerable = sum(not question.answers for question in dev) / len(dev)  # the F1 of empty answers
        return TaskData(SpanHead(), (), encoded.examples, (split,), "f1", notes, unanswerable, ("exact_match",))

    def head(self, source: Pretrained) -> Head:
        """Returns the head of a checkpoint."""
        return SpanHead()

    def validate(self, config: ConfigDict) -> None:
        """Raises `UserError` for an unknown version or invalid sizes of windows."""
        query_length, most = config.data.max_query_length, question_windows.max_query_tokens(config.max_seq_length)
        one_of(config, "data.version", VERSIONS)
        bad = squad_files.on_bad_answer(config.data)
        require(bad in ("stop", "skip"), "data.on_bad_answer", bad, "choose one of stop, skip")
        at_least_one(config, "data.doc_stride")
        allowed = f"must be 1 to max_seq_length - 8 = {most}"
        require(1 <= query_length <= most, "data.max_query_length", query_length, allowed)

    def read_labelled(self, source: Pretrained, path: str, **flags: Any) -> Questions:
        """Returns the questions in a file of SQuAD's format."""
        questions, version = squad_files.read_squad(path), source.settings.data.version
        if version == "v1.1" and not all(question.answers for question in questions):
            raise UserError(f"{path}: has questions without an answer; the run was trained on v1.1, which has none")
        sizes, tokenizer = WindowSizes.from_checkpoint(source), tokenizer_of(source)
        encoded = question_windows.encode_question_windows(questions, tokenizer, sizes, with_labels=False)
        summary = TableSummary("labelled", len(questions), encoded.examples, tokenizer, rows="questions", parts=2)
        note = "\n".join(summary.lines(source.max_seq_length))
        return Questions(encoded.examples, questions, encoded.windows, version, _threshold_of(source), note=note)

    def predict(self, source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
        """Yields, per question, `answer`, `start` and `end` characters, `probability`, `null_odds`, `cut` if truncated.

        The answer is empty if the null odds exceed the threshold that was tuned on the dev set.
        """
        questions = [Question(str(i), question, context) for i, (question, context) in enumerate(texts)]
        threshold, longest_query = _threshold_of(source), WindowSizes.from_checkpoint(source).max_query_length
        lengths = [len(ids) for ids in tokenizer_of(source).encode_ids([question.text for question in questions])]
        answers = _answers_by(source, questions)
        for question, length in zip(questions, lengths):
            best, null = answers[question.name]
            is_none = not best or null > threshold
            top = {"text": "", "start": 0, "end": 0, "probability": 0.0} if is_none else best[0]
            yield {
                "answer": top["text"],
                **{name: top[name] for name in ("start", "end", "probability")},
                "null_odds": null if best else None,
                **({"cut": True} if length > longest_query else {}),
            }

    def submission(self, source: Pretrained, path: str) -> tuple[str, str]:
        """Returns SQuAD's predictions.json for the questions in a file of SQuAD's format, and a summary."""
        questions, threshold = squad_files.read_squad(path, with_answers=False), _threshold_of(source)
        answers = _answers_by(source, questions)
        texts = {name: best[0]["text"] if best and null <= threshold else "" for name, (best, null) in answers.items()}
        empty = sum(not text for text in texts.values())
        return json.dumps(texts, ensure_ascii=False, indent=1) + "\n", f"{len(texts)} answers, {empty} of them empty,"


TASK = Squad()


def _threshold_of(source: Pretrained) -> float:
    return source.decided.get(THRESHOLD, np.inf)


def _answers_by(source: Pretrained, questions: Sequence[Question]) -> dict[str, tuple[list[dict], float]]:
    """Returns the answers of a checkpoint, see `question_windows.answers`."""
    sizes = WindowSizes.from_checkpoint(source)
    encoded = question_windows.encode_question_windows(questions, tokenizer_of(source), sizes, with_labels=False)
    logits = predictor.predict(SpanHead(), source, encoded.examples)
    return question_windows.answers(questions, encoded.windows, logits)

"""Answers in paragraphs: windows, labels, the n best answers, and a tiny run to its predictions file."""

import dataclasses
import json
import random

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config
from bertjax.config.experiments import load
from bertjax.finetuning import encoding, metrics, question_windows, squad_files
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning.question_windows import WindowSizes
from bertjax.finetuning.squad_files import Question
from bertjax.finetuning.tasks import squad
from bertjax.interop import pretrained
from bertjax.text.tokenizer import SPECIAL_TOKENS, Bytes, WordPiece
from bertjax.training.checkpoints.workdir import read_samples
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import TOPICS, make_corpus
from tests.finetuning.test_finetuning import quick, run
from tests.text.test_tokenizer import SIZE, learn

WORDS = [word for words in TOPICS.values() for word in words]
SIZES = WindowSizes(max_seq_length=24, doc_stride=7, max_query_length=5)


@pytest.fixture(scope="module")
def pieces():
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    return WordPiece([*SPECIAL_TOKENS, *WORDS, *letters, *("##" + x for x in letters), *".,:?!'\""], lowercase=True)


def random_questions(count, seed=0):
    """Random answers in paragraphs of known and unknown words."""
    rng, questions = random.Random(seed), []
    for number in range(count):
        words = [rng.choice([*WORDS, "Sails,", "x1", "Émile"]) for _ in range(rng.randint(1, 60))]
        first = rng.randrange(len(words))
        answer = " ".join(words[first : min(len(words), first + rng.randint(1, 4))])
        start = len(" ".join(words[:first])) + (first > 0)
        question = " ".join(rng.choices(WORDS, k=rng.randint(1, 8))) + "?"
        questions.append(Question(f"q{number}", question, " ".join(words), (answer,), (start,)))
    return questions


def test_labels_point_at_the_answer_in_the_text(pieces):
    questions = random_questions(300)
    examples, windows, cut, exact, apart = question_windows.encode_question_windows(
        questions, pieces, SIZES, with_labels=True
    )
    assert cut == sum(len(pieces.encode(q.text).ids) > 5 for q in questions) > 0
    labelled = set()
    for ids, (first, last), window in zip(examples.input_ids, examples.labels, windows):
        question = questions[window.question]
        assert len(ids) <= 24 and len(ids) == window.first + len(window.offsets) + 1
        assert ids[0] == pieces.cls_id and ids[window.first - 1] == ids[-1] == pieces.sep_id
        if first:
            offsets = window.offsets[[first - window.first, last - window.first]]
            assert question.context[offsets[0, 0] : offsets[1, 1]] == question.answers[0]
            labelled.add(window.question)
    # An answer that no window contains is longer than the stride of the windows.
    missing = [q for i, q in enumerate(questions) if i not in labelled]
    assert len(missing) == apart < 30 and exact == 300
    assert all(len(pieces.encode(q.answers[0]).ids) > 24 - 3 - 5 - 7 for q in missing)
    inside = Question("q", "ship?", "the anchor ship", ("nchor",), (5,))
    encoded = question_windows.encode_question_windows([inside], pieces, SIZES, with_labels=True)
    assert encoded.exact == 0 and encoded.notes([inside], 5) == (
        "1 training questions, 1 with an answer, in 1 windows",
        "1 answers start or end within a token; training uses the whole token",
    )


def test_windows_cover_every_token_and_one_window_has_maximum_context(pieces):
    for tokens in (1, 5, 16, 17, 40, 100):
        starts = encoding.window_starts(tokens, room=16, stride=7)
        covered = np.zeros(tokens, int)
        for start in starts:
            covered[start : start + 16] += 1
        assert covered.min() >= 1 and (np.diff(starts) == 7).all()
        best = question_windows.best_windows(tokens, starts, 16)
        for position, which in enumerate(best):
            start = starts[which]
            assert start <= position < start + 16
            sides = [min(position - s, min(s + 16, tokens) - 1 - position) for s in starts if s <= position < s + 16]
            assert min(position - start, min(start + 16, tokens) - 1 - position) == max(sides)


def test_gold_logits_give_the_gold_answers(pieces):
    """Logits of the gold answer give its text; logits of [CLS] give no answer."""
    questions = random_questions(40, seed=1)
    examples, windows, *_ = question_windows.encode_question_windows(questions, pieces, SIZES, with_labels=True)
    logits = []
    for ids, (first, last), window in zip(examples.input_ids, examples.labels, windows):
        scores = np.zeros((len(ids), 2))
        if first and window.is_best[first - window.first]:
            scores[first, 0] = scores[last, 1] = 9
        logits.append(scores)
    predictions = question_windows.answers(questions, windows, logits)
    texts = {name: best[0]["text"] for name, (best, _) in predictions.items()}
    scores = metrics.squad_scores({q.name: q.answers for q in questions}, texts)
    assert scores["exact_match"] > 90
    for best, _ in predictions.values():
        assert len(best) <= 20 and abs(sum(answer["probability"] for answer in best) - 1) < 1e-6
        assert [a["score"] for a in best] == sorted((a["score"] for a in best), reverse=True)
    first = predictions["q0"]
    for scores in logits:
        scores[0] = 20
    assert question_windows.answers(questions, windows, logits)["q0"][1] == pytest.approx(first[1] + 40)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("kind", [*SIZE, "bytes"])
def test_answers_have_whole_characters_and_no_surrounding_spaces(kind, lowercase):
    """Tokenizers compose or strip accents, split ligatures, and drop zero-width characters."""
    answers = ["cafe\u0301", "E\u0301", "\ufb01n", "ship", "\u1112\u1161\u11ab", "\u338f", "so\u00adft"]
    context = "  the ".join(["", *answers, " and\u200b an onion\u200f \t"])
    made = (
        Bytes()
        if kind == "bytes"
        else learn(kind, [*make_corpus(60).split("\n"), *[context] * 9], SIZE[kind] + 10, lowercase)
    )
    asked = [Question(text, "which?", context, (text,), (context.index(text),)) for text in answers]
    encoded = question_windows.encode_question_windows(asked, made, WindowSizes(384, 128, 64), with_labels=True)
    logits = [np.zeros((len(ids), 2)) for ids in encoded.examples.input_ids]
    for scores, (first, last) in zip(logits, encoded.examples.labels):
        scores[first, 0] = scores[last, 1] = 9
    predictions = question_windows.answers(asked, encoded.windows, logits)
    for text, (best, _) in predictions.items():
        assert best[0]["text"] == text and context[best[0]["start"] : best[0]["end"]] == text
        assert all(answer["text"] == answer["text"].strip() != "" for answer in best)
    assert encoded.exact == len(answers)


@pytest.mark.parametrize("context", ["", "\u200b", " ".join(["ship"] * 100)])
def test_contexts_without_a_possible_answer_give_an_empty_answer(pieces, context):
    """No token to read, or all likely starts lie behind all likely ends, as in an untrained model."""
    question = Question("q", "ship", context)
    encoded = question_windows.encode_question_windows([question], pieces, WindowSizes(384, 128, 64), with_labels=False)
    (ids,) = encoded.examples.input_ids
    logits = np.stack([np.arange(len(ids)), -np.arange(len(ids))], 1).astype(np.float32)
    best, null = question_windows.answers([question], encoded.windows, [logits])["q"]
    assert best == [] and json.loads(json.dumps(null, allow_nan=False)) > 1e30


def test_answers_are_not_too_long_not_reversed_and_not_in_the_question():
    offsets = np.array([[i, i + 1] for i in range(50)])
    window = question_windows.Window(0, 3, 0, offsets, np.ones(50, bool))
    rng = np.random.default_rng(0)
    for _ in range(20):
        for score, start, end in question_windows._spans(window, rng.normal(size=(54, 2))):
            assert 0 <= start < end <= start + question_windows.MAX_ANSWER_TOKENS and np.isfinite(score)


def squad_file(questions, version):
    paragraphs = []
    for question in questions:
        answers = [{"text": text, "answer_start": start} for text, start in zip(question.answers, question.starts)]
        asked = {"id": question.name, "question": question.text, "is_impossible": not answers, "answers": answers}
        paragraphs.append({"context": question.context, "qas": [asked]})
    return json.dumps({"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]})


def test_a_tiny_run_writes_predictions(checkpoint, tmp_path):
    for name, count in (("train", 40), ("dev", 20)):
        questions = random_questions(count, seed=count)
        questions[0] = dataclasses.replace(questions[0], text=" ".join(WORDS[:39]) + " " + WORDS[1])  # a long question
        questions = [Question(q.name, q.text, q.context) if i % 3 == 0 else q for i, q in enumerate(questions)]
        (tmp_path / f"{name}-v2.0.json").write_text(squad_file(questions, "v2.0"))
    config = fine_tuning_config("squad", version="v2.0", doc_stride=16, max_query_length=36)
    run(quick(config, tmp_path, checkpoint, max_seq_length=64, epochs=1.0), tmp_path / "run")
    files = [tmp_path / f"run/{name}.json" for name in ("predictions", "nbest_predictions", "null_odds")]
    predictions, best, odds = (json.loads(file.read_text()) for file in files)
    assert predictions.keys() == {q.name for q in questions}
    sample = read_samples(tmp_path / "run")[1]
    assert (sample["text"], sample["label"]) == (questions[2].text, questions[2].answers[0])
    assert sample["prediction"] == (predictions[questions[2].name] or "no answer")
    scores = read_metrics(tmp_path / "run")[-2]
    again = metrics.squad_scores({q.name: q.answers for q in questions}, predictions)
    assert all(scores[f"eval/{name}"] == pytest.approx(again[name] / 100) for name in ("f1", "exact_match"))
    assert "null_threshold" in (tmp_path / "run/report.txt").read_text()
    source = pretrained.read_pretrained(tmp_path / "run")
    assert source.architecture == "BertForQuestionAnswering"
    # The threshold of the checkpoint decides about empty answers.
    assert source.decided == {"null_threshold": scores["eval/null_threshold"]}
    texts = [(q.text, q.context) for q in questions]
    answers_found = list(squad.TASK.predict(dataclasses.replace(source, decided={}), texts))
    # Prediction encodes questions like evaluation, including the long question.
    for question, answer in zip(questions, answers_found):
        first = best[question.name][0]
        assert question.context[answer["start"] : answer["end"]] == answer["answer"]
        assert (answer["start"], answer["end"]) == (first["start"], first["end"])
        assert answer["probability"] == pytest.approx(first["probability"], rel=1e-4)
        assert answer["null_odds"] == pytest.approx(odds[question.name], abs=1e-4)
    middle = float(np.median([answer["null_odds"] for answer in answers_found]))
    decided = dataclasses.replace(source, decided={"null_threshold": middle})
    for before, answer in zip(answers_found, squad.TASK.predict(decided, texts)):
        assert answer["answer"] == ("" if before["null_odds"] > middle else before["answer"])
    content, note = squad.TASK.submission(source, str(tmp_path / "dev-v2.0.json"))
    assert json.loads(content) == predictions and note.startswith("20 answers")
    # Scoring without training gives the stored scores of the dev set; the threshold is not tuned again.
    again = finetuning_run.score(source, squad.TASK.read_labelled(source, str(tmp_path / "dev-v2.0.json")))
    assert again.scores == pytest.approx({name: scores[f"eval/{name}"] for name in again.scores})
    silent = dataclasses.replace(source, decided={"null_threshold": -1e9})
    none = finetuning_run.score(silent, squad.TASK.read_labelled(silent, str(tmp_path / "dev-v2.0.json")))
    assert none.scores["no_answer_f1"] == 1


@pytest.mark.parametrize("content, message", [
    ("{", r"train-v1.1.json: not in SQuAD's format \(Input data was truncated"),
    ('{"data": []}', r"has no question"),
    (squad_file([Question("q7", "ship?", "a ship")] * 2, "2.0"), r"two questions have the id q7"),
    (squad_file([Question("q7", "ship?", "a ship", ("ship",), ("x",))], "1.1"), r"qas\[0\].answers\[0\].answer_"),
    (squad_file([Question("q7", "ship?", "a ship", ("ship",), (-4,))], "1.1"), r"Expected `int` >= 0"),
    ('{"data": [{"paragraphs": [], "title": ' + "[" * 100_000, r"nested too deep"),
    (squad_file([Question("q7", None, "a ship")], "2.0"), r"Expected `str`, got `null` - at `\$.data\[0\].paragra"),
    ('{"data": [{"paragraphs": [{"context": "a", "qas": ["q7"]}]}]}', r"Expected `object`, got `str`"),
    (squad_file([Question("q7", "ship?", "a ship")], "1.1").replace("true", "false"), r"q7 has neither an answer"),
])  # fmt: skip
def test_mistakes_in_a_file_are_named(tmp_path, content, message):
    path = tmp_path / "train-v1.1.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        squad_files.read_squad(path)


def test_misplaced_answers_are_refused_or_skipped(pieces, tmp_path):
    """All misplaced answers are counted, and the first one is named. The dev set is scored including them."""
    for name, count in (("train", 20), ("dev", 6)):
        questions = random_questions(count, seed=count)
        questions[2::3] = [dataclasses.replace(q, starts=(q.starts[0] + 1,)) for q in questions[2::3]]
        (tmp_path / f"{name}-v1.1.json").write_text(squad_file(questions, "1.1"))
    config = load("squad:v1.1")
    config.data.path, config.max_seq_length = str(tmp_path), 64
    message = r"6 training questions have an answer that is not at its answer_start: q2, q5, q8, q11, q14 and 1 more \("
    with pytest.raises(
        UserError,
        match=message + r"in the first, '.*' is not at character \d+\); correct the answers, or .*on_bad_answer=skip",
    ):
        squad.TASK.load(config, pieces)
    config.data.on_bad_answer = "skip"
    dataset = squad.TASK.load(config, pieces)
    assert dataset.notes[0].endswith("q14 and 1 more; left out")
    assert dataset.notes[1].startswith("2 dev questions") and dataset.notes[1].endswith("q2, q5; still scored")
    assert dataset.notes[2].startswith("14 training questions, 14 with an answer")
    (split,) = dataset.dev
    predictions = split.decode([np.zeros((len(ids), 2)) for ids in split.examples.input_ids])
    assert len(predictions.texts) == 6
    assert split.decide(predictions) == {} and split.score(predictions).keys() == {
        "f1",
        "exact_match",
    }  # no threshold in v1.1
    config.data.on_bad_answer = "ignore"
    with pytest.raises(UserError, match=r"config.data.on_bad_answer = 'ignore': choose one of stop, skip"):
        squad.TASK.validate(config)

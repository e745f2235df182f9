"""Tags of words: files, labels, windows, and a tiny run."""

import dataclasses
import itertools
import json
import random

import ml_collections
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config
from bertjax.finetuning import conll, metrics, tagging, word_encoding
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning.tasks import ner, tag
from bertjax.interop import pretrained
from bertjax.text import tokenizer, vocabulary_learning
from bertjax.text.tokenizer import SPECIAL_TOKENS, WordPiece
from bertjax.text.words import join_of, join_words, split_words
from bertjax.training.checkpoints.workdir import RunInfo, differences, read_samples
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import TOPICS, make_corpus
from tests.finetuning.test_classify import write_table
from tests.finetuning.test_finetuning import quick, run
from tests.text.test_tokenizer import HARD, modernbert_json

WORDS = [word for words in TOPICS.values() for word in words]


@pytest.fixture(scope="module")
def pieces():
    letters = "abcdefghijklmnopqrstuvwxyz"
    return WordPiece([*SPECIAL_TOKENS, *WORDS[::2], *letters, *("##" + x for x in letters)], lowercase=True)


def conll_text(count, seed, bio=False, apart=False):
    """Sentences in IOB1, in which sea words are places and court words organisations; ten sentences per document.

    `apart`: no two entities are adjacent.
    """
    rng, lines = random.Random(seed), []
    for number in range(count):
        if number % 10 == 0:
            lines += ["-DOCSTART- -X- O O", ""]
        tags, words = [], rng.choices(WORDS, k=rng.randint(1, 14))
        if apart:
            words = [part for word in words for part in (word, "rose")]
        for word in words:
            tags.append("I-LOC" if word in TOPICS["sea"] else "I-ORG" if word in TOPICS["court"] else "O")
        if bio:
            tags = conll.to_bio(tags)
        lines += [f"{word} NN I-NP {tag}" for word, tag in zip(words, tags)] + [""]
    return "\n".join(lines) + "\n"


def test_iob1_and_bio_give_equal_tags(tmp_path):
    (tmp_path / "a").write_text(conll_text(200, 0))
    (tmp_path / "b").write_text(conll_text(200, 0, bio=True))
    one, other = conll.read_conll(tmp_path / "a"), conll.read_conll(tmp_path / "b")
    assert [s.tags for s in one] == [s.tags for s in other] and len(one) == 200
    assert {s.document for s in one} == set(range(1, 21))
    assert conll.tag_names(one) == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
    assert conll.to_bio(["I-A", "B-A", "I-A", "I-B", "O", "I-B"]) == ("B-A", "B-A", "I-A", "B-B", "O", "B-B")


@pytest.mark.parametrize("with_context", [True, False])
def test_every_word_keeps_the_tag_and_is_labelled_once(tmp_path, pieces, with_context):
    (tmp_path / "a").write_text(conll_text(300, 1))
    sentences = conll.read_conll(tmp_path / "a")
    labels = conll.tag_names(sentences)
    examples = word_encoding.encode_word_sequences(sentences, labels, pieces, 20, with_context)
    assert max(examples.lengths) <= 20
    logits = [np.eye(len(labels))[np.maximum(marks, 0)] for marks in examples.labels]
    read = word_encoding.read_tags(sentences, labels, examples, logits)
    assert read == [list(s.tags) for s in sentences]
    assert metrics.entity_scores([s.tags for s in sentences], read)["f1"] == 1
    # The labelled tokens in order are the first tokens of the words.
    firsts = [pieces.encode(word).ids[0] for s in sentences for word in s.words]
    marked = [i for ids, marks in zip(examples.input_ids, examples.labels) for i in ids[np.asarray(marks) >= 0]]
    assert marked == firsts
    assert len(word_encoding.encode_word_sequences(sentences, labels, pieces, 64, True)) < len(sentences)


def test_documents_do_not_share_a_sequence(tmp_path, pieces):
    (tmp_path / "a").write_text("ship O\n\n-DOCSTART- O\n\nsail O\n\nrose O\n")
    examples = word_encoding.encode_word_sequences(
        conll.read_conll(tmp_path / "a"), ("O",), pieces, 64, with_context=True
    )
    assert [int((np.asarray(marks) >= 0).sum()) for marks in examples.labels] == [1, 2]


def test_without_documents_sentences_are_encoded_separately(tmp_path, pieces):
    for name in ("train.txt", "dev.txt"):
        (tmp_path / name).write_text("ship O\n\nsail O\nnet I-LOC\n\nrose O\n")
    config = fine_tuning_config("ner", document_context=True)
    config.data.path = str(tmp_path)
    dataset = ner.TASK.load(config, pieces)
    assert len(dataset.train) == 3
    assert dataset.notes[-1] == "no -DOCSTART- lines: no document context for the dev sentences"
    (tmp_path / "dev.txt").write_text("ship O\nsail O\nnet I-MISC\n")
    with pytest.raises(UserError, match=r"dev.txt:3: the tag 'B-MISC' is not in the training file: O, B-LOC"):
        ner.TASK.load(config, pieces)


def test_words_without_tokens_and_words_with_too_many_tokens(pieces):
    sentences = [conll.Sentence(("\u200b", "x" * 60, "ship"), ("O", "O", "O"), 0)]
    examples = word_encoding.encode_word_sequences(sentences, ("O",), pieces, 12, with_context=False)
    assert sum(int((np.asarray(marks) >= 0).sum()) for marks in examples.labels) == 3
    assert max(examples.lengths) <= 12


def test_a_tiny_run_trains_a_tagger(checkpoint, tmp_path):
    (tmp_path / "eng.train").write_text(conll_text(300, 2, apart=True))
    (tmp_path / "eng.testa").write_text(conll_text(60, 3, apart=True))
    config = quick(fine_tuning_config("ner", document_context=True), tmp_path, checkpoint, epochs=8.0)
    config.eval.every_steps, config.optimizer.learning_rate = 1000, 5e-3
    run(config, tmp_path / "run")
    scores = read_metrics(tmp_path / "run")[-2]
    assert scores["eval/f1"] > 0.9
    source = pretrained.read_pretrained(tmp_path / "run")
    assert source.labels == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
    again = finetuning_run.score(source, ner.TASK.read_labelled(source, tmp_path / "eng.testa"))
    assert again.scores == pytest.approx({name: scores[f"eval/{name}"] for name in again.scores}, abs=0.02)
    sentences = conll.read_conll(tmp_path / "eng.testa")
    write_table(tmp_path / "test.jsonl", [{"w": s.words, "t": s.tags} for s in sentences])
    table = dataclasses.replace(source, settings=tag_config(tmp_path))
    assert finetuning_run.score(table, tag.TASK.read_labelled(table, str(tmp_path / "test.jsonl"))).scores["f1"] > 0.9
    samples = read_samples(tmp_path / "run")
    assert [sample["text"] for sample in samples] == [" ".join(s.words) for s in sentences[::6]]
    assert sum(sample["label"] == sample["prediction"] for sample in samples) >= 7
    assert any(sample["label"].startswith(("LOC: ", "ORG: ")) for sample in samples)
    tags = [result["tags"] for result in ner.TASK.predict(source, [(" ".join(s.words),) for s in sentences])]
    # without context from neighbouring sentences
    assert metrics.entity_scores([s.tags for s in sentences], tags)["f1"] > 0.9


@pytest.mark.parametrize("content, message", [
    ("ship NN O\nsail O\n", r"a:2: 2 columns, expected 3 as in earlier lines"),
    ("ship NN O\tO\nsail NN\tO\n", r"a:2: 3 columns, expected 4"),
    ("1 ship O\n2 sail O\n\n1 net O\n", r"a:1: the first column has 1, 2 instead of words"),
    ("bc/cctv/00 0 O\nbc/cctv/00 1 O\n", r"a:1: the first column has bc/cctv/00 instead of words"),
    ("# text = a ship\nship O\n", r"a:1: a comment, '# text = a ship'; remove lines that begin with #"),
    ("ship NN O\n#sent 2\n", r"a:2: a comment, '#sent 2'"),
    ("ship\n", r"a:1: 1 columns, expected at least 2: a word and a tag"),
    ("ship NN LOC\n", r"a:1: the tag is 'LOC', expected O, B-type or I-type"),
    ("\n-DOCSTART- O\n\n", r"a: has no sentence"),
])  # fmt: skip
def test_mistakes_in_a_file_are_named(tmp_path, content, message):
    (tmp_path / "a").write_text(content)
    with pytest.raises(UserError, match=message):
        conll.read_conll(tmp_path / "a")


def test_columns_between_tabs_may_have_spaces_in_words(tmp_path):
    for content, words in (
        ("ship\tO\nNew York\tB-LOC\n", ("ship", "New York")),
        ("New\tNN B-LOC\r\n ship \t NN O\r\n", ("New", "ship")),
        ("# O\n1 O\n", ("#", "1")),
        ("# NN O\n1 CD O\n", ("#", "1")),
    ):
        (tmp_path / "a").write_text(content)
        (sentence,) = conll.read_conll(tmp_path / "a")
        assert sentence.words == words and len(sentence.tags) == 2


RAW = 'yesterday (John) saw "Mary" in Paris, Rome/Berlin\u5317\u4eac.'
SPLIT = ["yesterday", "(", "John", ")", "saw", '"', "Mary", '"', "in", "Paris", ",", "Rome", "/", "Berlin", "\u5317",
         "\u4eac", "."]  # fmt: skip


def test_tagged_words_of_raw_text_have_character_offsets(checkpoint, monkeypatch):
    """Offsets do not depend on the model; a word of characters that no tokenizer reads is not a word."""
    source = pretrained.read_pretrained(checkpoint)
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    head = {"classifier": {"dense": {"bias": np.zeros(5)}}}
    source = dataclasses.replace(source, labels=labels, params=source.params | head)
    known = {"John": 1, "Mary": 1, "Paris": 3, "Rome": 3, "Berlin": 3, "\u5317": 3, "\u4eac": 4}

    def predict(output_layer, source, examples):
        words = iter(known.get(word, 0) for word in SPLIT)
        scores = []
        for marks in examples.labels:
            scores.append(np.zeros((len(marks), 5)))
            for place in np.flatnonzero(np.asarray(marks) >= 0):
                scores[-1][place, next(words)] = 1
        return scores

    monkeypatch.setattr(tagging.predictor, "predict", predict)
    tagged, nothing = ner.TASK.predict(source, [(RAW + " \u200b",), ("\u200b",)])
    assert tagged["words"] == SPLIT == [RAW[start:end] for start, end in tagged["offsets"]]
    assert [(e["type"], e["text"]) for e in tagged["entities"]] == [
        ("PER", "John"), ("PER", "Mary"), ("LOC", "Paris"), ("LOC", "Rome"), ("LOC", "Berlin"), ("LOC", "\u5317\u4eac")
    ]  # fmt: skip
    assert all(RAW[e["start"] : e["end"]] == e["text"] for e in tagged["entities"])
    assert nothing == {"words": [], "tags": [], "offsets": [], "entities": []}
    tagged, _ = ner.TASK.predict(dataclasses.replace(source, labels=("N", "V", "A", "P", "X")), [(RAW,), ("\u200b",)])
    assert "entities" not in tagged


@pytest.mark.parametrize("words, text", [
    ("London saw Paris , ( the whale ) 50 % . . .", "London saw Paris, (the whale) 50%..."),
    ("\" so \" it 's don ' t do n't ' a ' b \"", "\"so\" it's don't don't 'a' b\""),
    ("$ 5 : a - b", "$5: a - b"),
    ("我 们 。 Rome ไทย ภาษา", "我们。 Rome ไทยภาษา"),
])  # fmt: skip
def test_words_of_a_table_are_joined_like_text(words, text):
    joined, places = join_words(words.split())
    assert joined == text and [joined[a:b] for a, b in places] == words.split()


def of_kind(kind, folder):
    if kind == "modernbert":
        (folder / "tokenizer.json").write_text(json.dumps(modernbert_json()))
        return tokenizer.load_tokenizer("bpe", folder / "tokenizer.json")
    if kind == "bytes":
        return tokenizer.Bytes()
    learnt = "sentencepiece" if kind == "unigram" else kind
    lines = [*make_corpus(40).split("\n"), *HARD]
    learned = vocabulary_learning.learn_new_vocabulary(
        learnt, vocabulary_learning.count_words(learnt, lines), 420 if kind == "bpe" else 130
    )
    if kind == "unigram":
        (folder / "tokenizer.json").write_text(learned.to_huggingface())
        return tokenizer.load_tokenizer("unigram", folder / "tokenizer.json")
    return learned


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "unigram", "bytes", "bpe", "modernbert"])
def test_a_text_is_encoded_whole_and_words_have_one_tag(kind, checkpoint, tmp_path, monkeypatch):
    """A word has the tag of the first token that begins in the word, or continues the previous word."""
    pieces, labels = of_kind(kind, tmp_path), tuple("abcdefg")
    source = dataclasses.replace(
        pretrained.read_pretrained(checkpoint), tokenizer=pieces, labels=labels, settings=ml_collections.ConfigDict(),
        params={"classifier": {"dense": {"bias": np.zeros(7)}}},
    )  # fmt: skip
    source.settings.max_seq_length = 1000
    texts = [*HARD[:5], *HARD[6:9], 'London,(Paris)."U.S." x-ray', " \n\n a\r\nb   c\u200b ", "ไทย e\u0301\ufe0f <s>"]
    encoded_ids = []

    def predict(output_layer, source, examples):
        encoded_ids.extend(ids[len(pieces.begin) : len(ids) - len(pieces.end)].tolist() for ids in examples.input_ids)
        return [np.eye(7)[np.arange(len(ids)) % 7] for ids in examples.input_ids]

    monkeypatch.setattr(tagging.predictor, "predict", predict)
    predictions = list(ner.TASK.predict(source, [(text,) for text in texts]))
    encoded = [pieces.encode(text) for text in texts]
    assert encoded_ids == [encoding.ids for encoding in encoded]
    for text, result, (ids, offsets) in zip(texts, predictions, encoded):
        begins = {}
        for place, (i, (start, end)) in enumerate(zip(ids, offsets), len(pieces.begin)):
            blank = len(text[start:end]) - len(text[start:end].lstrip())
            if pieces.pieces[i].strip(" \u0120\u2581") and (blank < end - start or start == end):
                begins.setdefault(start + blank, labels[place % 7])
        assert {tuple(place) for place in result["offsets"]} <= set(split_words(text))
        before = None
        for label, word, (start, end) in zip(result["tags"], result["words"], result["offsets"], strict=True):
            assert word == text[start:end]
            before = next((begins[i] for i in range(start, end) if i in begins), before)
            assert label == before

    # A sentence of a table is encoded as its text, also in windows. Runs of older versions join words with spaces.
    words = "London saw Paris , the whale ( a ship ) .".split()
    sentence = conll.Sentence(tuple(words), tuple("abcdefgabcd"), 0)
    for length in (1000, 7):
        examples = word_encoding.encode_word_sequences([sentence], labels, pieces, length, with_context=True)
        logits = [np.eye(7)[np.maximum(marks, 0)] for marks in examples.labels]
        inside = [ids[len(pieces.begin) : len(ids) - len(pieces.end)].tolist() for ids in examples.input_ids]
        if kind != "bytes" or length > 7:  # words are split at this character
            assert [*itertools.chain(*inside)] == pieces.encode(join_words(words)[0]).ids
            tags = word_encoding.read_tags([sentence], labels, examples, logits)[0]
            assert [a == b for a, b in zip(tags, sentence.tags)].count(False) == len(words) - len(examples.words)
    spaced = word_encoding.encode_word_sequences([sentence], labels, pieces, 1000, False, join="spaces").input_ids[0]
    assert spaced.tolist() == pieces.framed([*itertools.chain(*pieces.encode_following(words))])


def test_a_run_stores_the_separator_of_words(checkpoint):
    config = tag_config("data")
    before = tag_config("data").unlock()
    del before.data.join  # a run of an older version
    assert (config.data.join, join_of(before), join_of(ml_collections.ConfigDict())) == ("text", "spaces", "text")
    infos = [RunInfo(run_config) for run_config in (before, config)]
    assert [d.field for d in differences(*infos, tag.TASK.identity) if d.is_fatal] == ["data.join"]
    chosen = tag_config("data").unlock()
    chosen.overrides = ("data.join",)
    assert ner.TASK.adopt(chosen, before) == [] and chosen.data.join == "text"
    assert ner.TASK.adopt(config, before) == ["data.join = 'spaces'"] and config.data.join == "spaces"
    source = dataclasses.replace(
        pretrained.read_pretrained(checkpoint),
        tokenizer=tokenizer.Bytes(),
        settings=before,
        architecture=tag.TASK.architecture,
    )
    assert source.reads_spaced_words and not dataclasses.replace(source, settings=chosen).reads_spaced_words
    with pytest.raises(UserError, match=r"data.join = 'text': the teacher .* with 'spaces'; set --config.data.join=sp"):
        tagging.check_teacher(source, chosen)
    chosen.data.join = "words"
    with pytest.raises(UserError, match=r"config\.data\.join"):
        ner.TASK.validate(chosen)


def tag_config(folder):
    config = fine_tuning_config("tag", words="w", tags="t", sentence="s")
    config.data.path = str(folder)
    return config


def test_user_tables_of_tags_are_read(tmp_path, pieces):
    """Tables with one word per row and with one sentence per row give equal sentences; entities, and other tags."""
    (tmp_path / "a").write_text(conll_text(30, 5))
    sentences = conll.read_conll(tmp_path / "a")
    for name in ("train", "dev"):
        rows = [f"{i}\t{word}\t{label}" for i, s in enumerate(sentences) for word, label in zip(s.words, s.tags)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["s\tw\tt", *rows]) + "\n")
    by_word = tag.TASK.load(tag_config(tmp_path), pieces)
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").unlink()
        write_table(tmp_path / f"{name}.jsonl", [{"w": s.words, "t": s.tags} for s in sentences])
    by_sentence = tag.TASK.load(tag_config(tmp_path), pieces)
    assert by_word.labels == by_sentence.labels == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
    assert by_word.metric == "f1" and len(by_word.train) == len(by_sentence.train) == 30
    for one, other in zip(by_word.train.labels, by_sentence.train.labels):
        np.testing.assert_array_equal(one, other)

    # A sentence that is named at its first word only.
    (tmp_path / "named.csv").write_text("s,w,t\n1,ship,O\n,sail,B-LOC\n2,rose,O\n")
    assert [s.words for s in tag.read_sentences(tmp_path / "named.csv", "w", "t", "s")] == [("ship", "sail"), ("rose",)]

    (tmp_path / "train.jsonl").write_text('{"w": ["ship", "rose"], "t": ["NOUN", "VERB"]}\n')
    (tmp_path / "dev.jsonl").write_text('{"w": ["ship", "rose"], "t": ["NOUN", "NOUN"]}\n')
    parts = tag.TASK.load(tag_config(tmp_path), pieces)
    assert parts.labels == ("NOUN", "VERB") and parts.metric == "accuracy"
    marks = np.asarray(parts.train.labels[0])
    assert parts.dev[0].score(parts.dev[0].decode([np.eye(2)[np.maximum(marks, 0)]])) == {"accuracy": 0.5}

    for content, message in (
        ('{"w": ["ship", ""], "t": ["NOUN", "VERB"]}', "the word is '' and the tag 'VERB'; set both"),
        ('{"w": ["ship"], "t": ["NOUN", "VERB"]}', "1 words and 2 tags, expected equal numbers"),
        ('{"w": "ship", "t": ["NOUN"]}', "w is not a list of strings"),
        ('{"w": "[ship", "t": ["NOUN"]}', "w is not a list of strings"),
        ('{"words": ["ship"], "t": ["NOUN"]}', "no column 'w'; choose --config.data.words from words, t"),
        ('{"w": ["ship"], "t": ["DET"]}', "the tag 'DET' is not in the training file: NOUN, VERB"),
    ):
        (tmp_path / "dev.jsonl").write_text(content + "\n")
        with pytest.raises(UserError, match="dev.jsonl:1: " + message):
            tag.TASK.load(tag_config(tmp_path), pieces)


def test_an_inconsistent_tag_is_reported_and_does_not_change_the_score(tmp_path, pieces):
    (tmp_path / "dev.csv").write_text("s,w,t\n1,ship,O\n")
    for content, message in (
        ("1,ship,B-LOC\n2,sail,O\n2,rose,b-LOC\n", r"train.csv:4: the tag is 'b-LOC', but other tags are B-type"),
        ("1,ship,B-LOC\n,,O\n2,rose,O\n", r"train.csv:3: the word is '' and the tag 'O'; set both"),
        (",ship,O\n,sail,B-LOC\n", r"train.csv:2: s is empty; write the name of the sentence in the first row"),
        ("1,ship,B-LOC\n1,sail,nan\n", r"train.csv:3: the word is 'sail' and the tag 'nan'; set both"),
        ('1,",O\n1,ship,B-LOC\n2,",O\n', r"train.csv:2: the word has several lines; write a quotation mark as"),
        ("1,1,B-LOC\n,,\n2,2,O\n", r"train.csv:2: config.data.words = 'w': the column has 1, 2 instead of words"),
    ):
        (tmp_path / "train.csv").write_text("s,w,t\n" + content)
        with pytest.raises(UserError, match=message):
            tag.TASK.load(tag_config(tmp_path), pieces)

"""Batches of lists: functions of (seed, step, lists), complete, and the same with and without packing."""

import dataclasses

import numpy as np
import pytest

from bertjax.finetuning import distillation
from bertjax.finetuning.classification import Windows
from bertjax.finetuning.encoding import encode_pairs, encode_windows
from bertjax.reranking import sets
from bertjax.reranking.evaluator import describe
from bertjax.reranking.forms import ListSet, RankingList
from bertjax.reranking.lists import PairEncoder
from bertjax.text.tokenizer import SPECIAL_TOKENS, WordPiece

WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer():
    return WordPiece([*SPECIAL_TOKENS, *WORDS], lowercase=True)


def made_lists(count: int, seed: int = 0) -> ListSet:
    """Lists of 1 to 6 documents of 1 to 20 words; some documents are in several lists."""
    rng = np.random.default_rng(seed)

    def text(most):
        return " ".join(rng.choice(WORDS, rng.integers(1, most)))

    pool, lists = [text(21) for _ in range(30)], []
    for _ in range(count):
        documents = tuple(dict.fromkeys(rng.choice(pool, rng.integers(1, 7))))
        lists.append(RankingList(text(6), documents, tuple(rng.integers(0, 3, len(documents)).tolist())))
    return ListSet(lists)


def examples_of(tokenizer, count=26, negatives=0, windows=None, length=24):
    encoder = PairEncoder(tokenizer, length, windows or Windows())
    return sets.encode_lists(made_lists(count), encoder, negatives)


def sequences_of(batch) -> set[tuple]:
    """The sequences of a batch: (list, position, grade, ids, token types)."""
    found = set()
    labels, weights = batch["labels"], batch["weights"]
    for row in range(len(labels)):
        for slot in np.flatnonzero(np.atleast_1d(weights[row])):
            label = labels[row][slot] if weights.ndim == 2 else labels[row]
            is_token = batch["segments"][row] == slot + 1
            found.add(
                (*map(float, label), *(tuple(batch[name][row][is_token]) for name in ("input_ids", "token_types")))
            )
    return found


def numbers_of(order, step) -> list[int]:
    """The lists of a step, from the pairs without in-batch negatives."""
    plain = order._examples.list_queries
    return [int(np.flatnonzero(plain == query)[0]) for query in np.unique(order.pairs(step).queries)]


@pytest.mark.parametrize("negatives", [0, 3])
@pytest.mark.parametrize("packs", [False, True])
def test_an_epoch_has_each_list_once_and_all_its_pairs_in_one_batch(tokenizer, packs, negatives):
    examples = examples_of(tokenizer, negatives=negatives)
    order = examples.make_order(8, 0, 64, 2, packs)
    assert order.steps_per_epoch == 4
    queries = []
    for step, batch in enumerate(order.batches(range(4), np.arange)):
        pairs, sequences = order.pairs(step), sequences_of(batch)
        assert len(sequences) == len(pairs.lists) == int(batch["weights"].sum())
        assert len(batch["input_ids"]) % 2 == 0 and batch["input_ids"].shape == order.shape(step)
        for slot in np.unique(pairs.lists):
            places = pairs.lists == slot
            (query,) = set(pairs.queries[places])
            (number,) = [i for i in np.flatnonzero(examples.list_queries == query) if i not in queries][:1]
            queries.append(number)
            own = examples.list_documents[number]
            assert pairs.positions[places].tolist() == list(range(places.sum()))
            assert pairs.documents[places][: len(own)].tolist() == own.tolist()
            drawn = pairs.documents[places][len(own) :]
            in_batch = set(np.concatenate([examples.list_documents[i] for i in numbers_of(order, step)]))
            others = in_batch - examples.relevant[int(query)]
            assert set(drawn) <= others and len(set(drawn)) == len(drawn) == min(negatives, len(others))
            assert not pairs.grades[places][len(own) :].any()
    assert sorted(queries) == list(range(26))


@pytest.mark.parametrize("packs", [False, True])
def test_a_batch_is_a_function_of_seed_and_step(tokenizer, packs):
    examples = examples_of(tokenizer, negatives=2)
    batches = list(examples.make_order(8, 1, 64, 2, packs).batches(range(9), np.arange))
    jumped = next(examples.make_order(8, 1, 64, 2, packs).batches(range(7, 8), np.arange))
    assert all((batches[7][name] == values).all() for name, values in jumped.items())
    assert sequences_of(batches[0]) != sequences_of(batches[4])  # another epoch
    other = next(examples.make_order(8, 2, 64, 2, packs).batches(range(1), np.arange))
    assert sequences_of(other) != sequences_of(batches[0])
    order = examples.make_order(8, 1, 64, 2, packs)
    halves = [
        next(order.batches(range(1), lambda count, half=half: np.arange(count)[half::2])) for half in range(2)
    ]  # of two hosts
    for name, values in batches[0].items():
        assert (values[0::2] == halves[0][name]).all() and (values[1::2] == halves[1][name]).all()


def test_packed_and_padded_batches_have_the_same_sequences(tokenizer):
    examples = examples_of(tokenizer)
    padded, packed = (examples.make_order(26, 0, 64, 1, packs) for packs in (False, True))
    (padded_batch,), (packed_batch,) = (list(order.batches(range(1), np.arange)) for order in (padded, packed))

    def without_slots(batch):
        return {sequence[1:] for sequence in sequences_of(batch)}

    assert without_slots(padded_batch) == without_slots(packed_batch)
    assert len(packed_batch["input_ids"]) < len(padded_batch["input_ids"]) / 2


def test_stored_targets_of_a_teacher_belong_to_the_lists(tokenizer):
    """Other documents, or another order of the lists, need new targets."""

    def key(examples):
        return distillation._key([], [examples])

    examples = examples_of(tokenizer)
    assert key(examples) == key(examples_of(tokenizer)) != key(examples_of(tokenizer, count=25))
    changed = [*examples.document_ids[:-1], [*examples.document_ids[-1], 7]]
    assert key(examples) != key(dataclasses.replace(examples, document_ids=changed))
    assert key(examples) != key(dataclasses.replace(examples, list_documents=examples.list_documents[::-1]))


def test_the_longest_in_batch_negative_fits_a_packed_row(tokenizer):
    long_query, long_document = " ".join(WORDS[:30]), " ".join(WORDS[10:50])
    lists = [RankingList(long_query, ("w1", "w2"), (1, 0)), RankingList("w3", (long_document, "w4"), (1, 0))]
    examples = sets.encode_lists(ListSet(lists), PairEncoder(tokenizer, 100), negatives=2)
    order = examples.make_order(2, 0, 128, 1, True)
    (batch,) = order.batches(range(1), np.arange)
    assert max(map(len, (ids for _, _, _, ids, _ in sequences_of(batch)))) == 30 + 40 + 3


def test_relevant_documents_outside_of_a_list_are_no_in_batch_negatives(tokenizer):
    lists = [
        RankingList("w1", ("w2", "w3"), (1, 0), (("w5", 1.0),)),
        RankingList("w4", ("w6", "w5"), (1, 0)),
    ]
    examples = sets.encode_lists(ListSet(lists), PairEncoder(tokenizer, 24), negatives=5)
    pairs = examples.pairs_of(np.arange(2), np.random.default_rng(0))
    texts = [tuple(examples.document_ids[i]) for i in pairs.documents[pairs.lists == 0]]
    assert len(texts) == 3 and tuple(tokenizer.encode_ids(["w5"])[0]) not in texts


@pytest.mark.parametrize("negatives", [0, 2])
def test_batches_do_not_depend_on_the_number_of_devices(tokenizer, negatives):
    examples = examples_of(tokenizer, 60, negatives)
    orders = [examples.make_order(8, 0, 64, multiple, True) for multiple in (1, 2, 8)]
    for step in range(3):
        batches = [next(order.batches(range(step, step + 1), np.arange)) for order in orders]
        rows = (batches[0]["weights"].sum(1) > 0).sum()
        for name, values in batches[0].items():
            assert all((values[:rows] == batch[name][:rows]).all() for batch in batches[1:]), name


def test_few_different_shapes_are_compiled(tokenizer):
    order = examples_of(tokenizer, 400).make_order(16, 0, 64, 1, True)
    counts = {order.shape(step)[0] for step in range(order.steps_per_epoch)}
    assert len(counts) <= 4


def test_the_line_about_single_documents_counts_pairs(tokenizer):
    lists = made_lists(12)
    pairs, encoder = sets.single_documents(lists), PairEncoder(tokenizer, 64)
    relevant = sum(grade > 0 for ranking in lists.lists for grade in ranking.grades)
    counts = f"{len(pairs.lists)} pairs, {relevant} of them relevant"
    assert describe("training", pairs.lists, sets.encode_lists(pairs, encoder)) == f"training: {counts}"
    lines = describe("dev", lists.lists, sets.encode_lists(lists, encoder))
    assert lines == f"dev: 12 lists of 1 to 5 documents, {counts}"


@pytest.mark.parametrize("length", [12, 24, 64])
def test_pairs_are_encoded_as_in_prediction(tokenizer, length):
    lists = made_lists(12)
    pairs = [(ranking.query, document) for ranking in lists.lists for document in ranking.documents]
    firsts, seconds = map(list, zip(*pairs))
    examples = sets.encode_lists(lists, PairEncoder(tokenizer, length))
    expected = encode_pairs(tokenizer, firsts, seconds, length, longer_keeps_more=True)
    assert_encoded(examples, expected.input_ids, expected.token_types)
    assert examples.count_truncated() == sum(lost > 0 for lost in expected.lost)
    windowed = dataclasses.replace(examples, encoder=PairEncoder(tokenizer, length, Windows("max", 4)))
    expected = encode_windows(tokenizer, firsts, seconds, length, 4)
    owners = assert_encoded(windowed, expected.input_ids, expected.token_types)
    assert owners.tolist() == expected.owners.tolist()


def test_a_prompt_precedes_each_query_and_no_document(tokenizer):
    lists = made_lists(6)
    prompted = lists._replace(lists=[ranking._replace(query=f"w7 {ranking.query}") for ranking in lists.lists])
    expected = sets.encode_lists(prompted, PairEncoder(tokenizer, 24))
    examples = sets.encode_lists(lists, PairEncoder(tokenizer, 24, query_prompt="w7 "))
    assert list(examples.query_ids) == list(expected.query_ids)
    assert list(examples.document_ids) == list(expected.document_ids)


def assert_encoded(examples, input_ids, token_types):
    numbers = np.repeat(np.arange(len(examples)), [len(documents) for documents in examples.list_documents])
    pairs = examples.pairs_of(np.arange(len(examples)), np.random.default_rng(0))
    assert pairs.lists.tolist() == numbers.tolist()
    encoded, owners = examples.encoded_with_owners(pairs)
    for name, expected in (("input_ids", input_ids), ("token_types", token_types)):
        assert [x.tolist() for x in getattr(encoded, name)] == [x.tolist() for x in expected]
    assert examples.sizes(pairs).tolist() == [len(ids) for ids in input_ids]
    return owners

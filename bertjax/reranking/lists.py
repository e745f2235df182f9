"""Training batches of lists: a query with documents and their grades.

Each pair of a query and a document is a sequence. The pairs of a list are in one batch, as sequences of their own, so
that lists of different lengths need no padding to the longest list. The batch of a step is a function of (seed, step,
lists) for any number of hosts and devices.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch, RowSize, take_rows
from bertjax.data.loading import packing
from bertjax.data.loading.examples import (
    Examples,
    Order,
    TrainingOrder,
    choose_row_size,
    padded_length,
    steps_per_epoch,
)
from bertjax.distributed.mesh import Rows
from bertjax.finetuning.classification import Windows
from bertjax.finetuning.encoding import pair_windows, truncate_pair
from bertjax.text.tokenizer import Tokenizer

NO_WINDOWS = Windows()
SAMPLED_PAIRS = 10_000  # pairs that choose the size of packed rows


@dataclasses.dataclass(frozen=True)
class PairEncoder:
    """Encodes pairs of texts from the ids of the texts: `[CLS] query [SEP] document [SEP]`.

    Attributes:
      tokenizer: the tokenizer.
      max_seq_length: the maximum number of tokens of a sequence.
      windows: the windows of long documents; without windows, a CrossEncoder truncates long pairs in the same way.
      query_prompt: precedes each query, before tokenization.
    """

    tokenizer: Tokenizer
    max_seq_length: int
    windows: Windows = NO_WINDOWS
    query_prompt: str = ""

    @functools.cached_property
    def special(self) -> int:
        """The number of special tokens of a sequence."""
        return len(self.tokenizer.framed((), ()))

    @property
    def room(self) -> int:
        """The number of tokens of both texts of a sequence."""
        return self.max_seq_length - self.special

    def parts(self, query: Sequence[int], document: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Returns the truncated pair, or the pairs of the query and each window of the document."""
        if not self.windows.combine:
            return [truncate_pair(query, document, self.room, longer_keeps_more=True)]
        return pair_windows(query, document, self.room, self.windows.stride)

    def sizes(self, query: int, document: int) -> list[int]:
        """Returns the number of tokens of each sequence of texts with these numbers of tokens."""
        if not self.windows.combine or query + document <= self.room:
            return [min(self.room, query + document) + self.special]
        return [len(a) + len(b) + self.special for a, b in self.parts(range(query), range(document))]

    def all_sizes(self, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of all sequences of pairs with these numbers of tokens, `[sequences]`."""
        if not self.windows.combine:
            return np.minimum(self.room, queries + documents) + self.special
        sizes = map(self.sizes, queries.tolist(), documents.tolist())
        return np.fromiter(itertools.chain.from_iterable(sizes), np.int64)

    def encode(self, query: Sequence[int], document: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the ids and the token types of each sequence of a pair."""
        for first, second in self.parts(query, document):
            ids = np.array(self.tokenizer.framed(first, second), np.int32)
            yield ids, self.tokenizer.token_types(len(ids), len(second) + len(self.tokenizer.end))


class StepPairs(NamedTuple):
    """The pairs of a step, `[pairs]` each.

    Attributes:
      lists: the index of the list of each pair, in the batch.
      positions: the position of the document in its list, from 0.
      queries: the index of the query.
      documents: the index of the document.
      grades: the grade of the document.
    """

    lists: np.ndarray
    positions: np.ndarray
    queries: np.ndarray
    documents: np.ndarray
    grades: np.ndarray


@dataclasses.dataclass(frozen=True)
class ListExamples(Examples):
    """Lists of documents for queries. An example is a list.

    `input_ids`, `token_types` and `labels` are empty: the sequences of a pair are encoded when a batch needs them.

    Attributes:
      encoder: encodes the pairs.
      query_ids: the ids of each query.
      document_ids: the ids of each distinct document.
      list_queries: `[lists]`, the index of the query of each list.
      list_documents: for each list, the indices of its documents.
      grades: for each list, the grades of its documents, or the scores of a teacher.
      negatives: the number of in-batch negatives: documents of other lists of the batch that become documents of a
        list, with the grade 0.
      relevant_elsewhere: for some queries, relevant documents that are in lists of other queries only.
    """

    encoder: PairEncoder = dataclasses.field(kw_only=True)
    query_ids: Sequence[Sequence[int]] = dataclasses.field(kw_only=True)
    document_ids: Sequence[Sequence[int]] = dataclasses.field(kw_only=True)
    list_queries: np.ndarray = dataclasses.field(kw_only=True)
    list_documents: Sequence[np.ndarray] = dataclasses.field(kw_only=True)
    grades: Sequence[np.ndarray] = dataclasses.field(kw_only=True)
    negatives: int = dataclasses.field(default=0, kw_only=True)
    relevant_elsewhere: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict, kw_only=True)

    def __len__(self) -> int:
        """Returns the number of lists."""
        return len(self.list_queries)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of the longest sequence of each list, `[lists]`."""
        return np.array([self.sizes_of_list(number).max() for number in range(len(self))], np.int64)

    @functools.cached_property
    def longest_list(self) -> int:
        """The number of documents of the longest list, with the in-batch negatives."""
        return max(map(len, self.list_documents)) + self.negatives

    @functools.cached_property
    def relevant(self) -> dict[int, set[int]]:
        """The documents that cannot be in-batch negatives of a query: its relevant documents, and all its documents."""
        documents = {query: set(numbers) for query, numbers in self.relevant_elsewhere.items()}
        for query, numbers in zip(self.list_queries.tolist(), self.list_documents):
            documents.setdefault(query, set()).update(numbers.tolist())
        return documents

    @functools.cached_property
    def _query_tokens(self) -> np.ndarray:
        return np.array(list(map(len, self.query_ids)), np.int64)

    @functools.cached_property
    def _document_tokens(self) -> np.ndarray:
        return np.array(list(map(len, self.document_ids)), np.int64)

    def sizes_of_list(self, number: int) -> np.ndarray:
        """Returns the number of tokens of each sequence of a list, without in-batch negatives, `[sequences]`."""
        documents = self._document_tokens[self.list_documents[number]]
        return self.encoder.all_sizes(np.full_like(documents, self._query_tokens[self.list_queries[number]]), documents)

    def identifying_arrays(self) -> Iterator[np.ndarray]:
        """Yields the ids of the queries and documents, and the query and the documents of each list."""
        arrays = itertools.chain(self.query_ids, self.document_ids, [self.list_queries], self.list_documents)
        yield from (np.asarray(values, np.int32) for values in arrays)

    def with_teacher(self, targets: Sequence[np.ndarray]) -> "ListExamples":
        """Returns the lists with the scores of a teacher as grades; `targets` are `[documents]` for each list."""
        return dataclasses.replace(self, grades=targets)

    def make_order(self, batch_size: int, seed: int, longest: int, multiple: int, packs: bool) -> Order:
        """Returns the assignment of the lists to the batches, see `Examples.make_order`."""
        return ListOrder(self, batch_size, seed, longest, multiple, packs)

    def pairs_of(self, numbers: np.ndarray, rng: np.random.Generator) -> StepPairs:
        """Returns the pairs of some lists, with in-batch negatives.

        Args:
          numbers: the indices of the lists.
          rng: draws the in-batch negatives.
        """
        chunks = []
        candidates = np.unique(np.concatenate([self.list_documents[number] for number in numbers]))
        for slot, number in enumerate(numbers):
            query, documents = self.list_queries[number], self.list_documents[number]
            grades = self.grades[number]
            if self.negatives:
                relevant = self.relevant[int(query)]
                allowed = [document for document in candidates.tolist() if document not in relevant]
                drawn = rng.permutation(np.array(allowed, np.int64))[: self.negatives]
                documents = np.concatenate([documents, drawn])
                grades = np.concatenate([grades, np.zeros(len(drawn), np.float32)])
            count = len(documents)
            places = np.full(count, slot), np.arange(count), np.full(count, query)
            chunks.append((*places, documents, grades))
        return StepPairs(*map(np.concatenate, zip(*chunks)))

    def encoded(self, pairs: StepPairs) -> Examples:
        """Returns the sequences of pairs as examples, see `encoded_with_owners`."""
        return self.encoded_with_owners(pairs)[0]

    def encoded_with_owners(self, pairs: StepPairs) -> tuple[Examples, np.ndarray]:
        """Returns the sequences of pairs as examples, and the number of the pair of each sequence.

        The labels are `[sequences, 3]` float32: the list in the batch, the position of the document in the list, and
        its grade.
        """
        input_ids, token_types, owners = [], [], []
        for number, (query, document) in enumerate(zip(pairs.queries, pairs.documents)):
            for ids, types in self.encoder.encode(self.query_ids[query], self.document_ids[document]):
                input_ids.append(ids)
                token_types.append(types)
                owners.append(number)
        labels = np.stack([pairs.lists, pairs.positions, pairs.grades], axis=1).astype(np.float32)[owners]
        return Examples(input_ids, token_types, labels), np.array(owners)

    def count_truncated(self) -> int:
        """Returns the number of pairs whose texts are longer than a sequence; 0 with windows of documents."""
        if self.encoder.windows.combine:
            return 0
        rooms = self.encoder.room - self._query_tokens[self.list_queries]
        counts = ((self._document_tokens[i] > room).sum() for i, room in zip(self.list_documents, rooms))
        return int(sum(counts))

    def sizes(self, pairs: StepPairs) -> np.ndarray:
        """Returns the number of tokens of each sequence of pairs, `[sequences]`."""
        return self.encoder.all_sizes(self._query_tokens[pairs.queries], self._document_tokens[pairs.documents])


class ListOrder(Order):
    """Assigns lists to the batches of training.

    Without packing, lists with sequences of similar length share a batch, see `TrainingOrder`. With packing, an epoch
    is a random permutation of the lists.

    Attributes:
      steps_per_epoch: the number of batches per epoch.
    """

    def __init__(
        self, examples: ListExamples, batch_size: int, seed: int, longest: int, multiple: int, packs: bool
    ) -> None:
        """Creates the order, see `Examples.make_order`; `batch_size` counts lists."""
        self._examples, self._batch_size, self._seed, self._longest = examples, batch_size, seed, longest
        self._multiple = multiple
        self.steps_per_epoch = steps_per_epoch(len(examples), batch_size)
        self._by_length = TrainingOrder(examples, batch_size, seed, longest)
        self._permutation = functools.lru_cache(2)(self._permute)
        self._row = self._choose_row() if packs else None

    def pairs(self, step: int) -> StepPairs:
        """Returns the pairs of a step, counted from 0."""
        if self._row is None:
            numbers = self._by_length.rows(step)
            numbers = numbers[numbers >= 0]
        else:
            epoch, index = divmod(step, self.steps_per_epoch)
            numbers = self._permutation(epoch)[index * self._batch_size : (index + 1) * self._batch_size]
        return self._examples.pairs_of(numbers, np.random.default_rng([self._seed, 3, step]))

    def shape(self, step: int) -> tuple[int, int]:
        """Returns the number of rows of a step, with padding, and their length."""
        sizes = self._examples.sizes(self.pairs(step))
        if self._row is None:
            return self._round_up(len(sizes)), padded_length(int(sizes.max()), self._longest)
        return self._round_up(self._bins(step, sizes).max() + 1), self._row.tokens

    def batches(self, steps: range, rows: Rows) -> Iterator[Batch]:
        """Yields the batches of steps, see `Order.batches`."""
        for step in steps:
            sequences = self._examples.encoded(self.pairs(step))
            sizes = np.array([len(ids) for ids in sequences.input_ids], np.int64)
            if self._row is None:
                count = self._round_up(len(sizes))
                places = np.pad(np.arange(len(sizes)), (0, count - len(sizes)), constant_values=-1)
                yield sequences.batch(places[rows(count)], padded_length(int(sizes.max()), self._longest))
                continue
            bins = self._bins(step, sizes)
            count, order = self._round_up(bins.max() + 1), np.argsort(bins, kind="stable")
            starts = packing.starts_in_rows(bins[order], sizes[order])
            batch, host_rows = sequences.packed(order, bins[order], starts, count, self._row), rows(count)
            yield batch if len(host_rows) == count else take_rows(batch, host_rows)

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, 0, epoch]).permutation(len(self._examples))

    def _bins(self, step: int, sizes: np.ndarray) -> np.ndarray:
        """Returns the packed row of each sequence of a step."""
        assert self._row is not None
        return packing.best_fit(sizes, self._row, np.random.default_rng([self._seed, 4, step]))

    def _choose_row(self) -> RowSize:
        """Returns the size of packed rows, from the sequences of the first lists."""
        examples, sizes = self._examples, list[int]()
        for number in range(len(examples)):
            sizes += examples.sizes_of_list(number).tolist()
            if len(sizes) >= SAMPLED_PAIRS:
                break
        # An in-batch negative can be the longest document, for the longest query.
        longest_query, longest_document = (max(map(len, ids)) for ids in (examples.query_ids, examples.document_ids))
        is_sampled = len(sizes) >= SAMPLED_PAIRS or examples.negatives
        longest = max(examples.encoder.sizes(longest_query, longest_document)) if is_sampled else max(sizes)
        sampled = Examples([np.empty(size, np.int8) for size in (*sizes, longest)], [])
        pairs = math.ceil(self._batch_size * np.mean([len(numbers) for numbers in examples.list_documents]))
        return choose_row_size(sampled, pairs, self._longest)

    def _round_up(self, rows: int) -> int:
        return packing.round_up_coarsely(int(rows), self._multiple)

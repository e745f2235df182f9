"""Encodes sentences of tagged words, and reads the tags of the words from logits.

The first token of a word carries its tag. Neighbouring sentences of a document share a sequence as context.

The tokens of some tokenizers contain the space before a word. These tokenizers encode a text as a whole, as in the
token-classification pipeline of transformers, and each word has the tag of the first token that begins in it. A word in
which no token begins continues the word before it. `config.data.join` decides how the words of a table become a text.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from bertjax.common.errors import UserError
from bertjax.data.loading.examples import Examples
from bertjax.finetuning.conll import Sentence
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.words import TEXT, join_words, split_words


@dataclasses.dataclass(frozen=True)
class WordExamples(Examples):
    """Sequences of words.

    Attributes:
      words: for each token with a label, in order, the number of words that have the tag of the token: 1, and 1 more
        for each following word in which no token begins.
      unread: the number of words that are [UNK], or whose last tokens are truncated.
    """

    words: Sequence[int] = ()
    unread: int = 0


@dataclasses.dataclass
class _Group:
    """Consecutive tokens. The first token has the tag of `words` words, or of 0 words if the tokens are spaces."""

    ids: list[int]
    words: int
    is_read: bool = True


def encode_word_sequences(
    sentences: Sequence[Sentence],
    labels: Sequence[str],
    tokenizer: Tokenizer,
    max_seq_length: int,
    with_context: bool,
    join: str = TEXT,
) -> WordExamples:
    """Encodes sequences that contain each word once, in order.

    The first token of a word has the label of the word, other tokens have the label -1. A sentence that is longer than
    a sequence is divided between words.

    Args:
      sentences: the sentences.
      labels: the tags, by index of the label.
      tokenizer: the tokenizer.
      max_seq_length: the maximum number of tokens of a sequence.
      with_context: whether consecutive sentences of a document share a sequence, as long as the sentences fit.
      join: `config.data.join`.

    Raises:
      UserError: for a tag that is not in `labels`.
    """
    if not is_whole(tokenizer, join):
        tokens = tokenizer.encode_following([word for sentence in sentences for word in sentence.words])
        of_words = (_Group(ids or [tokenizer.unk_id], 1, bool(ids)) for ids in tokens)
        groups = [[next(of_words) for _ in sentence.words] for sentence in sentences]
        return _examples(sentences, labels, tokenizer, max_seq_length, with_context, groups, groups)
    texts = [join_words(sentence.words) for sentence in sentences]
    groups = [_groups(*text, tokenizer) for text in texts]
    following = groups
    if with_context and not tokenizer.begins_with_space:
        following = [_groups(f" {text}", [(a + 1, b + 1) for a, b in places], tokenizer) for text, places in texts]
    return _examples(sentences, labels, tokenizer, max_seq_length, with_context, groups, following)


def is_whole(tokenizer: Tokenizer, join: str) -> bool:
    """Returns whether a text is encoded as a whole, and not word by word."""
    return bool(tokenizer.space) and join == TEXT


def _groups(text: str, places: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> list[_Group]:
    """Returns the tokens of a text, grouped by word. A word that the tokenizer drops becomes [UNK]."""
    ids, owners, is_covered = _owners(text, places, tokenizer)
    groups, last, word = [], _Group([], 0), -1  # `last` is the last group with words, and `word` the last word in it

    def pass_to(following: int) -> None:
        """Assigns the words between `word` and the next word in which a token begins."""
        nonlocal last
        for place in range(word + 1, following):
            if is_covered[place]:
                last.words += 1
            else:
                last = _Group([tokenizer.unk_id], 1, is_read=False)
                groups.append(last)

    for token, owner in zip(ids, owners):
        if owner > word:
            pass_to(owner)
            word, last = owner, _Group([token], 1)
            groups.append(last)
        elif owner < 0 or not groups:
            groups.append(_Group([token], 0))
        else:
            groups[-1].ids.append(token)
    pass_to(len(places))
    return groups


def _owners(
    text: str, places: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> tuple[list[int], list[int], list[bool]]:
    """Encodes a text whose words are at these places.

    Returns the ids of the tokens, the number of the word in which each token begins, or -1, and for each word whether a
    token covers characters of it. A token that contains the space before a word begins in this word; a token of spaces
    begins in no word.
    """
    ids, offsets = tokenizer.encode(text)
    owners, is_covered, word = [], [False] * len(places), 0
    for token, (start, end) in zip(ids, offsets):
        end = max(end, start + 1)  # Some tokens of a character with several tokens are empty.
        while word < len(places) and places[word][1] <= start:
            word += 1
        if _is_space(tokenizer.pieces[token], tokenizer):
            owners.append(-1)
            continue
        inside = word
        while inside < len(places) and places[inside][0] < end:
            is_covered[inside] = True
            inside += 1
        owners.append(word if inside > word else -1)
    return ids, owners, is_covered


def _is_space(token: str, tokenizer: Tokenizer) -> bool:
    return not token.replace(tokenizer.space, " ").strip()


def _examples(
    sentences: Sequence[Sentence],
    labels: Sequence[str],
    tokenizer: Tokenizer,
    max_seq_length: int,
    with_context: bool,
    groups: Sequence[Sequence[_Group]],
    following: Sequence[Sequence[_Group]],
) -> WordExamples:
    """Encodes sequences as `encode_word_sequences` does.

    Args:
      sentences: the sentences.
      labels: see `encode_word_sequences`.
      tokenizer: the tokenizer.
      max_seq_length: see `encode_word_sequences`.
      with_context: see `encode_word_sequences`.
      groups: the tokens of each sentence at the beginning of a sequence.
      following: the tokens of each sentence after another sentence.
    """
    indices, room = {label: i for i, label in enumerate(labels)}, max_seq_length - len(tokenizer.framed(()))
    input_ids, all_labels, document, words, unread = [], [], None, [], 0
    ids: list[int] = []
    marks: list[int] = []  # the label of each token, or -1

    def close() -> None:
        if ids:
            input_ids.append(np.array(tokenizer.framed(ids), np.int32))
            before, after = ([-1] * len(tokens) for tokens in (tokenizer.begin, tokenizer.end))
            all_labels.append(np.array([*before, *marks, *after], np.int32))
        ids.clear()
        marks.clear()

    for sentence, first, later in zip(sentences, groups, following):
        if unknown := [i for i, tag in enumerate(sentence.tags) if tag not in indices]:
            place, tag = sentence.where[unknown[0]], sentence.tags[unknown[0]]
            raise UserError(f"{place}: the tag {tag!r} is not in the training file: {', '.join(labels)}")
        size = sum(min(len(group.ids), room) for group in later)
        if not with_context or sentence.document != document or len(ids) + size > room:
            close()
        document, number = sentence.document, 0
        for group in later if ids else first:
            tokens = group.ids[:room]
            if len(ids) + len(tokens) > room:
                close()
            ids.extend(tokens)
            marks.extend([indices[sentence.tags[number]] if group.words else -1, *[-1] * (len(tokens) - 1)])
            words += [group.words] if group.words else []
            unread += not group.is_read or len(group.ids) > room
            number += group.words
    close()
    types = [tokenizer.token_types(len(ids)) for ids in input_ids]
    return WordExamples(input_ids, types, all_labels, per_token=True, words=words, unread=unread)


def read_tags(
    sentences: Sequence[Sentence], labels: Sequence[str], examples: Examples, logits: Sequence[np.ndarray]
) -> list[list[str]]:
    """Returns the most likely tag of each word of each sentence.

    A word in which no token begins continues the tag of the word before it: `I-` follows `B-`.
    """
    if examples.labels is None:
        raise ValueError("the examples have no labels, which mark the first tokens of words")
    best = (
        labels[int(index)]
        for marks, scores in zip(examples.labels, logits)
        for index in scores.argmax(-1)[np.asarray(marks) >= 0]
    )
    continued = {f"B-{label[2:]}": label for label in labels if label.startswith("I-")}
    counts = getattr(examples, "words", ()) or itertools.repeat(1)
    tags = iter(
        tag for first, count in zip(best, counts) for tag in (first, *[continued.get(first, first)] * (count - 1))
    )
    return [[next(tags) for _ in sentence.words] for sentence in sentences]


def encode_text(
    texts: Sequence[str], labels: Sequence[str], tokenizer: Tokenizer, max_seq_length: int, join: str
) -> tuple[list[Sentence], list[list[tuple[int, int]]], WordExamples]:
    """Encodes plain texts for prediction.

    Returns:
      The words of each text as a sentence with the tag `labels[0]`, the start and end characters of each word, and the
      examples. Words that the tokenizer drops, such as words of control characters, are left out.
    """
    places = [word_places(text, tokenizer, join) for text in texts]
    words = [tuple(text[start:end] for start, end in text_places) for text, text_places in zip(texts, places)]
    sentences = [Sentence(row, (labels[0],) * len(row), index) for index, row in enumerate(words)]
    if is_whole(tokenizer, join):
        groups = [
            _groups(text, text_places, tokenizer) if text_places else [] for text, text_places in zip(texts, places)
        ]
        examples = _examples(sentences, labels, tokenizer, max_seq_length, False, groups, groups)
    else:
        examples = encode_word_sequences(sentences, labels, tokenizer, max_seq_length, with_context=False, join=join)
    return sentences, places, examples


def word_places(text: str, tokenizer: Tokenizer, join: str) -> list[tuple[int, int]]:
    """Returns the start and end characters of the words of a text that the tokenizer does not drop."""
    places = split_words(text)
    if is_whole(tokenizer, join):
        *_, is_covered = _owners(text, places, tokenizer)
        return [place for place, is_read in zip(places, is_covered) if is_read]
    encoded = tokenizer.encode_following([text[start:end] for start, end in places])
    return [place for place, ids in zip(places, encoded) if ids]

"""Tagging of words, such as CoNLL-2003's named entities (Devlin et al. 2019, section 5.3).

The first piece of a word carries its tag. Neighbouring sentences of a document share a sequence as context.

The pieces of some tokenizers contain the space before a word. These tokenizers encode a text as a whole, as in the
token-classification pipeline of transformers, and each word has the tag of the first piece that begins in it. A word in
which no piece begins continues the word before it. `config.data.join` decides how the words of a table become a text.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.limits import one_of
from bertjax.data.corpus.tables import TFDS, cell, read_text, read_tfds
from bertjax.data.loading.examples import Examples
from bertjax.finetuning import metrics
from bertjax.finetuning.contamination import seen_in_training
from bertjax.finetuning.table_summary import TableSummary
from bertjax.finetuning.task import Dataset, FineTuningTask, InputForm, Split
from bertjax.inference import output_layers
from bertjax.inference.output_layers import OutputLayer
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.words import JOINS, TEXT, join_of, join_words, split_words
from bertjax.training.checkpoints import workdir

INPUTS = InputForm(range(1, 2), "texts")
DOCUMENT = "-DOCSTART-"
FILES = {"train": ("eng.train", "train.txt", "train.conll"), "dev": ("eng.testa", "dev.txt", "valid.txt", "dev.conll")}


@dataclasses.dataclass(frozen=True)
class Sentence:
    """Words and their tags; entity tags are BIO. `document` is the index of the document.

    `where`: FILE:LINE of each word, for messages.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    document: int
    where: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class WordExamples(Examples):
    """Sequences of words.

    Args:
      words: for each token with a label, in order, the number of words that have its tag: 1, and 1 more for each word
        after it in which no token begins.
      unread: number of words that have no token but [UNK], or whose last tokens are truncated.
    """

    words: Sequence[int] = ()
    unread: int = 0


@dataclasses.dataclass
class _Group:
    """Consecutive tokens. The first token has the tag of `words` words, or of 0 words if the tokens are spaces."""

    ids: list[int]
    words: int
    is_read: bool = True


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the training and dev files of the folder. Raises `UserError` for missing or invalid files."""
    path = config.data.path
    if path.startswith(TFDS):
        train, dev = (read_examples(path, split) for split in ("train", "dev"))
    else:
        train, dev = (read(find_file(path, name)) for name in ("train", "dev"))
    settings = config.max_seq_length, config.data.document_context, join_of(config)
    found = dataset(train, dev, tag_names(train), tokenizer, *settings)
    for name, sentences in (("training", train), ("dev", dev)):
        if config.data.document_context and sentences[-1].document == len(sentences) - 1:
            note = f"no {DOCUMENT} lines: no document context for the {name} sentences"
            found = dataclasses.replace(found, notes=(*found.notes, note))
    return found


def dataset(
    train: Sequence[Sentence],
    dev: Sequence[Sentence],
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    max_seq_length: int,
    with_context: bool,
    join: str = TEXT,
) -> Dataset:
    """Makes a dataset of tagged sentences. The metric is entity F1 if all tags are BIO, otherwise the word accuracy."""
    examples, dev_examples = (
        encode(side, labels, tokenizer, max_seq_length, with_context, join) for side in (train, dev)
    )
    has_entities = all(map(is_bio, labels))
    words = sum(len(sentence.words) for sentence in train)
    notes = [
        f"{len(train)} training sentences, {words} words, {len(labels)} tags, in {len(examples)} sequences; "
        f"{len(dev)} dev sentences in {len(dev_examples)}"
    ]
    for name, side, made in (("training", train, examples), ("dev", dev, dev_examples)):
        notes += TableSummary(name, len(side), made, tokenizer, rows="sentences").lines(max_seq_length)
    notes += seen_in_training((s.words for s in train), ("dev sentences", (s.words for s in dev)))
    notes += _unread(examples.unread + dev_examples.unread)
    metric, tags = "f1" if has_entities else "accuracy", Counter(tag for sentence in dev for tag in sentence.tags)
    baseline = 0.0 if has_entities else max(tags.values()) / tags.total()
    more_metrics = ("precision", "recall") if has_entities else ()
    return Dataset(
        output_layers.tagging(len(labels)),
        labels,
        examples,
        (split(dev, labels, dev_examples),),
        metric,
        tuple(notes),
        baseline,
        more_metrics,
    )


def adopt(config, theirs) -> list[str]:
    """Takes `data.join` of an earlier run, unless the user has set the field; returns the change."""
    if "join" not in config.data or "data.join" in config.get("overrides", ()):
        return []
    if (before := join_of(theirs)) == config.data.join:
        return []
    config.data.join = before
    return [f"data.join = {before!r}"]


def validate(config) -> None:
    if "join" in config.data:
        one_of(config, "data.join", JOINS)


def check_teacher(source: Pretrained, config) -> None:
    """Raises `UserError` if a teacher was trained on words that were joined in another way than the words of a run."""
    ours, theirs = join_of(config), join_of(source.settings)
    if source.tokenizer.space and "join" in config.data and ours != theirs:
        raise UserError(
            f"config.data.join = {ours!r}: the teacher {source.path} was trained with {theirs!r}; set "
            f"--config.data.join={theirs}"
        )


def split(sentences: Sequence[Sentence], labels: Sequence[str], examples: Examples) -> Split:
    """Returns sentences with how their tags are scored."""
    gold, has_entities = [list(sentence.tags) for sentence in sentences], all(map(is_bio, labels))

    def score(logits: list[np.ndarray]) -> dict[str, float]:
        found = read_tags(sentences, labels, examples, logits)
        if has_entities:
            types = metrics.entity_scores_by_type(gold, found)
            return metrics.entity_scores(gold, found) | {f"f1_{name}": its["f1"] for name, its in types.items()}
        return {"accuracy": metrics.accuracy(np.concatenate(gold), np.concatenate(found))}

    def files(logits: list[np.ndarray]) -> dict[str, str]:
        found, rows = read_tags(sentences, labels, examples, logits), []
        for number in workdir.sample_indices(len(sentences)):
            words = sentences[number].words
            shown = (_shown(words, tags, has_entities) for tags in (gold[number], found[number]))
            rows.append((" ".join(words), *shown))
        return workdir.samples_file(rows)

    return Split(examples, score, files=files)


def _shown(words: Sequence[str], tags: Sequence[str], has_entities: bool) -> str:
    """Returns the entities of a sentence, or its words with their tags, as text."""
    if not has_entities:
        return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags))
    found = (f"{type_}: {' '.join(words[first:end])}" for type_, first, end in metrics.entities(tags))
    return "; ".join(found) or "none"


def labelled(
    source: Pretrained, path: str, output_layer: Callable[[int], OutputLayer] = output_layers.tagging
) -> tuple[OutputLayer, Split]:
    """Returns the output layer, and the sentences in a file like the training data with how they are scored."""
    return of_sentences(source, read(path), output_layer, source.settings.data.document_context)


def of_sentences(
    source: Pretrained,
    sentences: Sequence[Sentence],
    output_layer: Callable[[int], OutputLayer] = output_layers.tagging,
    with_context: bool = False,
) -> tuple[OutputLayer, Split]:
    """As `labelled`, of sentences."""
    labels, tokenizer, join = source.labels, source.tokenizer, join_of(source.settings)
    examples = encode(sentences, labels, tokenizer, source.max_seq_length, with_context, join)
    summary = TableSummary("labelled", len(sentences), examples, tokenizer, rows="sentences")
    note = "\n".join([*summary.lines(source.max_seq_length), *_unread(examples.unread)])
    return output_layer(len(labels)), dataclasses.replace(split(sentences, labels, examples), note=note)


def _unread(count: int) -> list[str]:
    """Returns a line about words that are not read, if there are some."""
    return [f"{count} words truncated or replaced by [UNK]: they have too many pieces, or none"] if count else []


def find_file(folder: str, name: str) -> epath.Path:
    """Returns the file of a split. Raises `UserError` if there is none."""
    for file in FILES[name]:
        if (path := epath.Path(folder) / file).exists():
            return path
    raise UserError(f"config.data.path = {folder!r}: no {' or '.join(FILES[name])} in it")


def read(path: epath.PathLike) -> list[Sentence]:
    """Reads a CoNLL file: one word per line, its tag (IOB1 or BIO) in the last column; blank lines between sentences.

    -DOCSTART- lines separate documents; without any, each sentence is a document.

    Raises `UserError` with file, line and the expected value.
    """
    lines = read_text(path).split("\n")
    split = _split_at_tabs if _is_split_at_tabs(lines) else _split_at_spaces
    sentences, words, tags, where, document, columns = [], [], [], [], 0, 0

    def close():
        if words:
            sentences.append(Sentence(tuple(words), to_bio(tags), document, tuple(where)))
        for cells in (words, tags, where):
            cells.clear()

    for number, line in enumerate(lines, 1):
        cells = split(line)
        if not cells or cells[0] == DOCUMENT:
            close()
            document += bool(cells)
            continue
        if cells[0].startswith("#") and (len(cells) != (columns or max(2, len(cells))) or not is_bio(cells[-1])):
            raise UserError(f"{path}:{number}: a comment, {line.strip()[:60]!r}; remove lines that begin with #")
        columns = columns or len(cells)
        if len(cells) != columns or columns < 2:
            expected = f"{columns} as in the lines before" if columns > 1 else "a word and its tag"
            raise UserError(f"{path}:{number}: {len(cells)} columns, expected {expected}")
        if not is_bio(cells[-1]):
            raise UserError(f"{path}:{number}: the tag is {cells[-1]!r}, expected O, B-type or I-type")
        words.append(cells[0])
        tags.append(cells[-1])
        where.append(f"{path}:{number}")
    close()
    if not sentences:
        raise UserError(f"{path}: no sentence in it")
    check_words(sentences, "the first column", may_be_one=columns < 3)
    if not document:
        return [dataclasses.replace(sentence, document=index) for index, sentence in enumerate(sentences)]
    return sentences


def _split_at_spaces(line: str) -> list[str]:
    cells = line.strip(" \t\r").replace("\t", " ").split(" ")  # not split(): words may contain other whitespace
    return [cell for cell in cells if cell]


def _split_at_tabs(line: str) -> list[str]:
    return [cell for cell in map(str.strip, line.split("\t")) if cell]


def _is_split_at_tabs(lines: Sequence[str]) -> bool:
    """Returns whether all lines have as many columns only if spaces are part of some words."""
    spaces, tabs = (
        Counter(len(cells) for line in lines if (cells := split(line)) and cells[0] != DOCUMENT and cells[0][0] != "#")
        for split in (_split_at_spaces, _split_at_tabs)
    )
    return len(tabs) == 1 < len(spaces) and max(tabs) > 1 and max(spaces, key=spaces.get) == max(tabs)


def check_words(sentences: Sequence[Sentence], column: str, may_be_one: bool = True) -> None:
    """Raises `UserError` if a column of words has numbers, of words or sentences; or, unless it may, one name only."""
    words = {word for sentence in sentences for word in sentence.words}
    is_name = not may_be_one and len(words) == 1 < sum(len(sentence.words) for sentence in sentences)
    if all(map(_is_count, words)) or is_name:
        raise UserError(f"{sentences[0].where[0]}: {column} has no words, but {', '.join(sorted(words)[:3])}")


def _is_count(word: str) -> bool:
    return re.fullmatch(r"\d+([-.]\d+)?", word) is not None  # or as CoNLL-U: 1-2, 8.1


def read_examples(path: str, split: str) -> list[Sentence]:
    """Reads the sentences of "tfds:conll2003", each as its own document: it has no document boundaries."""
    sentences = []
    for index, row in enumerate(read_tfds(path, split)):
        words, tags = (cell(row, name) for name in ("tokens", "ner"))
        if wrong := [tag for tag in tags if not is_bio(tag)]:
            raise UserError(f"{row.where}: the tag is {wrong[0]!r}, expected O, B-type or I-type")
        sentences.append(Sentence(tuple(words), to_bio(tags), index, (row.where,) * len(words)))
    return sentences


def is_bio(tag: str) -> bool:
    """Returns whether a tag is O, B-type or I-type."""
    kind, _, type_ = tag.partition("-")
    return tag == "O" or (kind in ("B", "I") and bool(type_))


def to_bio(tags: Sequence[str]) -> tuple[str, ...]:
    """Converts IOB1 or BIO to BIO, in which each entity starts with B."""
    out = ["O"] * len(tags)
    for type_, first, end in metrics.entities(tags):
        out[first:end] = [f"B-{type_}", *[f"I-{type_}"] * (end - first - 1)]
    return tuple(out)


def tag_names(sentences: Sequence[Sentence]) -> tuple[str, ...]:
    """Returns O, then B and I of each entity type."""
    types = sorted({tag[2:] for sentence in sentences for tag in sentence.tags if tag != "O"})
    return ("O", *(f"{kind}-{type_}" for type_ in types for kind in "BI"))


def encode(
    sentences: Sequence[Sentence],
    labels: Sequence[str],
    tokenizer: Tokenizer,
    max_seq_length: int,
    with_context: bool,
    join: str = TEXT,
) -> WordExamples:
    """Encodes sequences that contain each word once, in order. The first piece of a word has its label, others have -1.

    With context, consecutive sentences of a document share a sequence while they fit. A sentence that is longer than a
    sequence is split between words. `join`: as `config.data.join`.

    Raises `UserError` for a tag that is not in `labels`.
    """
    if not is_whole(tokenizer, join):
        pieces = tokenizer.encode_following([word for sentence in sentences for word in sentence.words])
        of_words = (_Group(ids or [tokenizer.unk_id], 1, bool(ids)) for ids in pieces)
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
    groups, last, word = [], _Group([], 0), -1  # the last group with words; its last word

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
        end = max(end, start + 1)  # of several pieces for one character, some are empty
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


def _is_space(piece: str, tokenizer: Tokenizer) -> bool:
    return not piece.replace(tokenizer.space, " ").strip()


def _examples(
    sentences: Sequence[Sentence],
    labels: Sequence[str],
    tokenizer: Tokenizer,
    max_seq_length: int,
    with_context: bool,
    groups: Sequence[Sequence[_Group]],
    following: Sequence[Sequence[_Group]],
) -> WordExamples:
    """As `encode`, of the tokens of each sentence at the beginning of a sequence, and after another sentence."""
    indices, room = {label: i for i, label in enumerate(labels)}, max_seq_length - len(tokenizer.framed(()))
    input_ids, all_labels, ids, marks, document, words, unread = [], [], [], [], None, [], 0

    def close():
        if ids:
            input_ids.append(np.array(tokenizer.framed(ids), np.int32))
            around = [[-1] * len(pieces) for pieces in (tokenizer.begin, tokenizer.end)]
            all_labels.append(np.array([*around[0], *marks, *around[1]], np.int32))
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
            pieces = group.ids[:room]
            if len(ids) + len(pieces) > room:
                close()
            ids.extend(pieces)
            marks.extend([indices[sentence.tags[number]] if group.words else -1, *[-1] * (len(pieces) - 1)])
            words += [group.words] if group.words else []
            unread += not group.is_read or len(group.ids) > room
            number += group.words
    close()
    types = [tokenizer.token_types(len(each)) for each in input_ids]
    return WordExamples(input_ids, types, all_labels, per_token=True, words=words, unread=unread)


def read_tags(
    sentences: Sequence[Sentence], labels: Sequence[str], examples: Examples, logits: Sequence[np.ndarray]
) -> list[list[str]]:
    """Returns the most likely tag of each word of each sentence.

    A word in which no token begins continues the tag of the word before it: `I-` follows `B-`.
    """
    best = (
        labels[int(index)]
        for marks, scores in zip(examples.labels, logits)
        for index in scores.argmax(-1)[np.asarray(marks) >= 0]
    )
    continued = {f"B-{label[2:]}": label for label in labels if label.startswith("I-")}
    counts = getattr(examples, "words", ()) or itertools.repeat(1)
    found = iter(
        tag for first, count in zip(best, counts) for tag in (first, *[continued.get(first, first)] * (count - 1))
    )
    return [[next(found) for _ in sentence.words] for sentence in sentences]


def layer_of(source: Pretrained, output_layer: Callable[[int], OutputLayer] = output_layers.tagging) -> OutputLayer:
    """Returns the output layer that a checkpoint has; `output_layer` makes it of the number of labels."""
    return output_layer(len(source.params["classifier"]["dense"]["bias"]))


def predict(
    source: Pretrained,
    texts: Sequence[tuple[str, ...]],
    output_layer: Callable[[int], OutputLayer] = output_layers.tagging,
) -> Iterator[dict]:
    """Yields, per text, its `words`, `tags` and `offsets` (start and end characters); `entities` if all tags are BIO.

    Words are those of `split_words`, without any that the tokenizer drops, such as one of control characters.
    """
    labels, join = source.label_names(len(source.params["classifier"]["dense"]["bias"])), join_of(source.settings)
    places = [_read_words(text, source.tokenizer, join) for (text,) in texts]
    words = [tuple(text[start:end] for start, end in found) for (text,), found in zip(texts, places)]
    sentences = [Sentence(found, (labels[0],) * len(found), index) for index, found in enumerate(words)]
    sizes = dict(max_seq_length=source.max_seq_length, with_context=False)
    if is_whole(source.tokenizer, join):
        groups = [_groups(text, found, source.tokenizer) if found else [] for (text,), found in zip(texts, places)]
        examples = _examples(sentences, labels, source.tokenizer, **sizes, groups=groups, following=groups)
    else:
        examples = encode(sentences, labels, source.tokenizer, **sizes, join=join)
    logits = output_layers.predict(output_layer(len(labels)), source, examples)
    has_entities = all(map(is_bio, labels))
    for (text,), sentence, offsets, tags in zip(
        texts, sentences, places, read_tags(sentences, labels, examples, logits)
    ):
        result = {"words": list(sentence.words), "tags": tags, "offsets": [list(place) for place in offsets]}
        if has_entities:
            spans = [(type_, offsets[first][0], offsets[end - 1][1]) for type_, first, end in metrics.entities(tags)]
            result["entities"] = [
                {"type": type_, "text": text[start:end], "start": start, "end": end} for type_, start, end in spans
            ]
        yield result


def _read_words(text: str, tokenizer: Tokenizer, join: str) -> list[tuple[int, int]]:
    places = split_words(text)
    if is_whole(tokenizer, join):
        *_, is_covered = _owners(text, places, tokenizer)
        return [place for place, is_read in zip(places, is_covered) if is_read]
    encoded = tokenizer.encode_following([text[start:end] for start, end in places])
    return [place for place, ids in zip(places, encoded) if ids]


TASK = FineTuningTask(
    "BertForTokenClassification",
    INPUTS,
    load,
    predict,
    output_layer=layer_of,
    method="tag",
    validate=validate,
    adopt=adopt,
    identity=("data.join",),
    labelled=labelled,
)

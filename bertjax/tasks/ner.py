"""Tagging of words, such as CoNLL-2003's named entities (Devlin et al. 2019, section 5.3).

The first piece of a word carries its tag. Neighbouring sentences of a document share a sequence as context.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from etils import epath

from bertjax.config import UserError
from bertjax.data.batches.examples import Examples
from bertjax.data.documents.tables import TFDS, cell, read_text, read_tfds
from bertjax.interop.pretrained import Pretrained
from bertjax.tasks import metrics, output_layers
from bertjax.tasks.finetuning import Dataset, FineTuningTask, InputForm, Split
from bertjax.tasks.output_layers import OutputLayer
from bertjax.tasks.overlap import seen_in_training
from bertjax.tasks.table_summary import TableSummary
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.words import split_words
from bertjax.training import workdir

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


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the training and dev files of the folder. Raises `UserError` for missing or invalid files."""
    path = config.data.path
    if path.startswith(TFDS):
        train, dev = (read_examples(path, split) for split in ("train", "dev"))
    else:
        train, dev = (read(find_file(path, name)) for name in ("train", "dev"))
    found = dataset(train, dev, tag_names(train), tokenizer, config.max_seq_length, config.data.document_context)
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
) -> Dataset:
    """Makes a dataset of tagged sentences. The metric is entity F1 if all tags are BIO, otherwise the word accuracy."""
    examples, dev_examples = (encode(side, labels, tokenizer, max_seq_length, with_context) for side in (train, dev))
    has_entities = all(map(is_bio, labels))
    words = sum(len(sentence.words) for sentence in train)
    notes = [
        f"{len(train)} training sentences, {words} words, {len(labels)} tags, in {len(examples)} sequences; "
        f"{len(dev)} dev sentences in {len(dev_examples)}"
    ]
    for name, side, made in (("training", train, examples), ("dev", dev, dev_examples)):
        notes += TableSummary(name, len(side), made, tokenizer, rows="sentences").lines(max_seq_length)
    notes += seen_in_training((s.words for s in train), ("dev sentences", (s.words for s in dev)))
    if unread := unread_words((*train, *dev), tokenizer, max_seq_length - len(tokenizer.framed(()))):
        notes.append(f"{unread} words truncated or replaced by [UNK]: they have too many pieces, or none")
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
        for number in workdir.samples(len(sentences)):
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
    labels = source.labels
    examples = encode(sentences, labels, source.tokenizer, source.max_seq_length, with_context)
    return output_layer(len(labels)), split(sentences, labels, examples)


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
    sentences: Sequence[Sentence], labels: Sequence[str], tokenizer: Tokenizer, max_seq_length: int, with_context: bool
) -> Examples:
    """Encodes sequences that contain each word once, in order. The first piece of a word has its label, others have -1.

    With context, consecutive sentences of a document share a sequence while they fit. A sentence that is longer than a
    sequence is split between words.

    Raises `UserError` for a tag that is not in `labels`.
    """
    indices, room = {label: i for i, label in enumerate(labels)}, max_seq_length - len(tokenizer.framed(()))
    pieces = iter(_pieces([word for sentence in sentences for word in sentence.words], tokenizer, room))
    input_ids, all_labels, ids, marks, document = [], [], [], [], None

    def close():
        if ids:
            input_ids.append(np.array(tokenizer.framed(ids), np.int32))
            around = [[-1] * len(pieces) for pieces in (tokenizer.begin, tokenizer.end)]
            all_labels.append(np.array([*around[0], *marks, *around[1]], np.int32))
        ids.clear()
        marks.clear()

    for sentence in sentences:
        if unknown := [i for i, tag in enumerate(sentence.tags) if tag not in indices]:
            place, tag = sentence.where[unknown[0]], sentence.tags[unknown[0]]
            raise UserError(f"{place}: the tag {tag!r} is not in the training file: {', '.join(labels)}")
        words = [next(pieces) for _ in sentence.words]
        size = sum(map(len, words))
        if not with_context or sentence.document != document or len(ids) + size > room:
            close()
        document = sentence.document
        for word, tag in zip(words, sentence.tags):
            if len(ids) + len(word) > room:
                close()
            ids.extend(word)
            marks.extend([indices[tag], *[-1] * (len(word) - 1)])
    close()
    types = [tokenizer.token_types(len(each)) for each in input_ids]
    return Examples(input_ids, types, all_labels, per_token=True)


def _pieces(words: Sequence[str], tokenizer: Tokenizer, limit: int) -> list[list[int]]:
    """Returns the ids of each word's pieces, at least one and at most `limit`."""
    return [ids[:limit] or [tokenizer.unk_id] for ids in tokenizer.encode_following(words)]


def unread_words(sentences: Sequence[Sentence], tokenizer: Tokenizer, limit: int) -> int:
    """Returns the number of words with no piece, or more than `limit`."""
    counts = Counter(word for sentence in sentences for word in sentence.words)
    encoded = tokenizer.encode_following(list(counts))
    return sum(count for ids, count in zip(encoded, counts.values()) if not 0 < len(ids) <= limit)


def read_tags(
    sentences: Sequence[Sentence], labels: Sequence[str], examples: Examples, logits: Sequence[np.ndarray]
) -> list[list[str]]:
    """Returns the most likely tag of each word of each sentence."""
    found = iter(
        int(index)
        for marks, scores in zip(examples.labels, logits)
        for index in scores.argmax(-1)[np.asarray(marks) >= 0]
    )
    return [[labels[next(found)] for _ in sentence.words] for sentence in sentences]


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
    labels = source.label_names(len(source.params["classifier"]["dense"]["bias"]))
    places = [_read_words(text, source.tokenizer) for (text,) in texts]
    words = [tuple(text[start:end] for start, end in found) for (text,), found in zip(texts, places)]
    sentences = [Sentence(found, (labels[0],) * len(found), index) for index, found in enumerate(words)]
    examples = encode(sentences, labels, source.tokenizer, source.max_seq_length, with_context=False)
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


def _read_words(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    places = split_words(text)
    encoded = tokenizer.encode_following([text[start:end] for start, end in places])
    return [place for place, ids in zip(places, encoded) if ids]


TASK = FineTuningTask(
    "BertForTokenClassification",
    INPUTS,
    load,
    predict,
    output_layer=layer_of,
    method="tag",
    labelled=labelled,
)

"""Sets of texts that belong together, or do not: what vectors are learnt from, and judged by.

A set has one of the `FORMS`. It is a file, or the train or dev file of a folder.
"""

import dataclasses
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.lists import split_at_commas
from bertjax.data.corpus.tables import SUFFIXES, Row, column, read_table, read_text
from bertjax.data.loading.examples import Examples
from bertjax.embedding import retrieval
from bertjax.embedding.retrieval import Search
from bertjax.finetuning.encoding import encode_pairs
from bertjax.finetuning.targets import Number
from bertjax.finetuning.tasks import squad, squad_files
from bertjax.text.tokenizer import Tokenizer

QUERY, DOCUMENT = "query", "document"
ANY = None  # the kind of a text that is neither
PAIRS = dict(form="pairs", texts="anchor,positive", label="label")  # what a set is unless something else is said


class TextSet(NamedTuple):
    """The examples of a set.

    Attributes:
      texts: the texts of each example; all have as many.
      values: the score or the label of each example; None: the first two texts belong together, others do not.
      skipped: how many rows of the file are no examples, by reason.
    """

    texts: Sequence[tuple[str, ...]]
    values: np.ndarray | None = None
    skipped: Mapping[str, int] = types.MappingProxyType({})

    @property
    def labels(self) -> np.ndarray:
        """The values or, without, numbers `[examples, texts]`: equal texts have the same, whatever their prompts."""
        if self.values is not None:
            return self.values
        return np.reshape(_numbered(text for example in self.texts for text in example)[0], (len(self.texts), -1))

    def describe(self, name: str) -> str:
        return f"{len(self.texts)} {name} examples"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a set is and what it holds, as a section of the config says, with the fields of `config.data`.

    Args:
      section: its name, such as data.sets.NAME.
      inherited: the fields that it does not say, and has of `data`.
      weight: how often a training set is used in an epoch.
      ignore_identical_ids: whether a query never finds the document with its id.
    """

    section: str
    path: str
    form: str
    texts: str
    label: str
    weight: float = 1.0
    inherited: frozenset[str] = frozenset()
    ignore_identical_ids: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of the texts."""
        return tuple(map(str.strip, split_at_commas(self.texts)))

    def said(self, name: str) -> str:
        """Returns the field of the config that says this, and what it says."""
        field = f"data.{name}" if name in self.inherited else f"{self.section}.{name}"
        return f"config.{field} = {getattr(self, name)!r}"

    def require(self, ok: bool, name: str, remedy: str) -> None:
        """Raises `UserError` unless `ok`."""
        if not ok:
            raise UserError(f"{self.said(name)}: {remedy}")

    def validate(self, forms: Collection[str] = ()) -> None:
        """Raises `UserError` for what is wrong, whatever the file is.

        `forms`: those that it may have; all by default.
        """
        forms = forms or FORMS
        self.require(self.form in forms, "form", f"choose one of {', '.join(forms)}")
        form, columns = FORMS[self.form], self.columns
        self.require(not form.columns or all(columns), "texts", "name the columns of the texts, such as one,other")
        self.require(not form.columns or len(columns) in form.columns, "texts", form.needs)
        self.require(self.weight > 0, "weight", "must be above 0; or leave the set out")
        has_ids = "is for form=search, whose files have ids; leave it out"
        self.require(not self.ignore_identical_ids or form.has_ids, "ignore_identical_ids", has_ids)


class Flagged(Source):
    """A set that flags of a command say, the path as --data."""

    def said(self, name: str) -> str:
        return f"--{'data' if name == 'path' else name}={getattr(self, name)}"


@dataclasses.dataclass(frozen=True)
class Form:
    """What the examples of a set are.

    Args:
      read: (file, columns of the texts, column of the label) -> the set. Raises `UserError` with file and line for what
        is no example.
      columns: how many columns of texts there may be; none if the file says where its texts are.
      needs: says so.
      files: the names of its file in a folder, of which there is one; {} stands for train or dev.
      is_search: whether the first text is a query, and the others are documents; prompts differ.
      read_search: (file) -> what is looked for, if the files say more of that than their examples do.
      values: type of the scores or labels of a set; None: it has none.

    A form that `has_ids` is read with the ids of its queries and documents.
    """

    read: Callable[[epath.Path, Sequence[str], str], TextSet]
    columns: range = range(0)
    needs: str = ""
    files: tuple[str, ...] = tuple("{}" + suffix for suffix in SUFFIXES)
    is_search: bool = False
    read_search: Callable[[epath.Path], Search] | None = None
    values: type | None = None

    @property
    def has_ids(self) -> bool:
        return self.read_search is not None


def _read_pairs(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    del label
    return TextSet([_texts(row, texts) for row in read_table(path)[0]])


def _read_scored(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    rows, _ = read_table(path)
    scores = np.array([Number().value(row, label) for row in rows], np.float32)
    _check_values(path, label, scores, "scores")
    return TextSet([_texts(row, texts) for row in rows], scores)


def _read_labelled(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    rows, _ = read_table(path)
    labels = []
    for row in rows:
        if (value := Number().value(row, label)) not in (0, 1):
            raise UserError(
                f"{row.where}: {label} is {value:g}, expected 1 or 0: whether the texts belong together; degrees of it "
                f"are form=scored"
            )
        labels.append(int(value))
    labels = np.array(labels, np.int32)
    _check_values(path, label, labels, "labels")
    return TextSet([_texts(row, texts) for row in rows], labels)


def _check_values(path: epath.Path, label: str, values: np.ndarray, what: str) -> None:
    if (values == values[0]).all():
        raise UserError(f"{path}: all {what}, in column {label!r}, are {values[0]:g}: nothing can be learnt or judged")


def _read_sentences(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    del label
    if path.suffix == ".txt":
        found = [line.strip() for line in read_text(path).splitlines()]
    else:
        found = [_texts(row, texts[:1])[0] for row in read_table(path)[0]]
    kept = [(text, text) for text in found if text]
    if not kept:
        raise UserError(f"{path}: no text in it")
    return TextSet(kept, skipped={"empty": len(found) - len(kept)})


def _read_squad(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    del texts, label
    asked = squad_files.read(path)
    found = [(each.text, each.context) for each in asked if each.answers]
    if not found:
        raise UserError(f"{path}: no question with an answer in it")
    return TextSet(found, skipped={"questions without an answer": len(asked) - len(found)})


def _read_beir(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    del texts, label
    return TextSet(retrieval.read(path).texts)


def _texts(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the texts of a row. Raises `UserError` if one is empty."""
    found = tuple(column(row, name).strip() for name in names)
    for name, text in zip(names, found):
        if not text:
            raise UserError(f"{row.where}: {name} is empty; each example needs all of its {len(names)} texts")
    return found


MOST = 100  # columns of texts
FORMS = {
    "pairs": Form(
        _read_pairs, range(2, MOST), "pairs need two columns or more: query, positive, negatives", is_search=True
    ),
    "scored": Form(_read_scored, range(2, 3), "scored pairs have two texts: name their two columns", values=np.float32),
    "labelled": Form(
        _read_labelled, range(2, 3), "labelled pairs have two texts: name their two columns", values=np.int32
    ),
    "sentences": Form(_read_sentences, range(1, MOST), "name the column of the sentences", ("{}.txt", *Form.files)),
    "squad": Form(_read_squad, files=tuple(f"{{}}-{version}.json" for version in squad.VERSIONS), is_search=True),
    "search": Form(_read_beir, files=("qrels/{}.tsv",), is_search=True, read_search=retrieval.read),
}
WITH_QUERIES = tuple(name for name, form in FORMS.items() if form.is_search)
JUDGES = tuple(name for name in FORMS if name != "sentences")  # which by themselves say nothing of vectors


def read(source: Source, *parts: str) -> TextSet:
    """Reads a set.

    Args:
      parts: such as train or dev: which file of a folder; one of these is there.

    Raises `UserError` for a missing or invalid file.
    """
    return FORMS[source.form].read(_find(source, parts), source.columns, source.label)


def shape_of(given) -> tuple[int, type | None]:
    """Returns how many texts the examples of such a set have, and the type of their values, if they have any."""
    form = FORMS[given.form]
    return len(split_at_commas(given.texts)) if form.columns.start > 1 else 2, form.values


def read_search(source: Source, *parts: str, held_out: Collection[str] = ()) -> Search:
    """As `read`, what is looked for in a set whose form `is_search`.

    `held_out`: the only queries to return; all by default.
    """
    if reader := FORMS[source.form].read_search:
        found = reader(_find(source, parts))
        kept = [i for i, query in enumerate(found.queries) if not held_out or query in held_out]
        named = ("queries", "relevant", "identical")
        found = found._replace(**{name: [getattr(found, name)[i] for i in kept] for name in named})
        return found._replace(ignores_identical_ids=source.ignore_identical_ids)
    found = read(source, *parts)
    return retrieval.of_texts((part(found, held_out) if held_out else found).texts)


def part(found: TextSet, firsts: Collection[str], is_inside: bool = True) -> TextSet:
    """Returns the examples whose first texts are in `firsts`, or the rest of the examples."""
    kept = [number for number, (first, *_) in enumerate(found.texts) if (first in firsts) == is_inside]
    values = None if found.values is None else found.values[kept]
    return found._replace(texts=[found.texts[i] for i in kept], values=values)


def read_training_search(path: str, form: str, texts: str) -> Search:
    """Reads the training set that --data, --form and --texts say. Raises `UserError` if it has no queries."""
    source = Flagged("", **PAIRS | dict(path=path, form=form, texts=texts))
    source.validate(WITH_QUERIES)
    return read_search(source, "train")


def _find(source: Source, parts: Sequence[str]) -> epath.Path:
    """Returns the file of a set. Raises `UserError` unless there is exactly one."""
    place, names = epath.Path(source.path), FORMS[source.form].files
    if not place.is_dir():
        source.require(place.is_file(), "path", "no such file or folder")
        suffixes = tuple(dict.fromkeys(epath.Path(name).suffix for name in names))
        if place.suffix not in suffixes:
            raise UserError(f"{source.path}: form={source.form} is read from {', '.join(suffixes)}")
        return place
    names = [name.format(part) for part in parts for name in names]
    found = [name for name in names if (place / name).exists()]
    source.require(bool(found), "path", f"no {', '.join(names)} in it")
    source.require(len(found) == 1, "path", f"both {found[0]} and {found[-1]} in it; name the file")
    return place / found[0]


class EncodedTexts(NamedTuple):
    """Texts as ids.

    Attributes:
      examples: each is one text, and each text occurs once.
      numbers: `[examples of the set, texts]`: which of these each text of the set is; see also `encode_search`.
      lost: how many tokens of each text were cut off.
    """

    examples: Examples
    numbers: np.ndarray
    lost: Sequence[int] = ()


def encode(
    found: TextSet, form: str, prompts: dict[str | None, str], tokenizer: Tokenizer, max_seq_length: int
) -> EncodedTexts:
    """Encodes the texts of a set, each after a prompt.

    Queries have the prompt `QUERY`, documents `DOCUMENT`, and the texts of sets without queries `ANY`.
    """
    kinds = (QUERY, DOCUMENT) if FORMS[form].is_search else (ANY, ANY)
    texts = (prompts[kinds[i > 0]] + text for example in found.texts for i, text in enumerate(example))
    encoded = _encoded(texts, tokenizer, max_seq_length)
    return encoded._replace(numbers=encoded.numbers.reshape(len(found.texts), -1))


def encode_search(
    search: Search, prompts: dict[str | None, str], tokenizer: Tokenizer, max_seq_length: int
) -> EncodedTexts:
    """Encodes queries and then documents, each with its prompt before it; `numbers` are `[queries + documents]`."""
    sides = ((QUERY, search.queries), (DOCUMENT, search.documents))
    return _encoded((prompts[kind] + text for kind, texts in sides for text in texts), tokenizer, max_seq_length)


def _encoded(texts: Iterable[str], tokenizer: Tokenizer, max_seq_length: int) -> EncodedTexts:
    which, once = _numbered(texts)
    input_ids, token_types, lost = encode_pairs(tokenizer, once, None, max_seq_length)
    return EncodedTexts(Examples(input_ids, token_types), which, lost)


def _numbered(texts: Iterable[str]) -> tuple[np.ndarray, list[str]]:
    """Returns the number of each text, and the texts by number, each once."""
    numbers: dict[str, int] = {}
    which = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
    return which, list(numbers)


def training_examples(encoded: EncodedTexts, labels: np.ndarray) -> Examples:
    """Returns examples of several texts each, with `TextSet.labels`."""
    which = encoded.numbers
    input_ids, token_types = (
        [arrays[i] for i in which.ravel()] for arrays in (encoded.examples.input_ids, encoded.examples.token_types)
    )
    return Examples(input_ids, token_types, labels, choices=which.shape[1])

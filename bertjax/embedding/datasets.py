"""The sets of texts that embeddings are trained on and evaluated on.

The examples of a set have one of the `FORMS`. The location of a set is a file, or a folder with a train or dev file.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.lists import split_at_commas
from bertjax.data.loading.examples import Examples
from bertjax.embedding import retrieval
from bertjax.embedding.forms import FORMS, WITH_QUERIES, FileForm, Form, TextSet, number_texts, score_columns
from bertjax.embedding.retrieval import Search
from bertjax.finetuning.encoding import encode_pairs
from bertjax.text.tokenizer import Tokenizer

QUERY, DOCUMENT = "query", "document"
ANY = None  # the kind of a text that is neither a query nor a document
Prompts = Mapping[str | None, str]
PAIRS = dict(form="pairs", texts="anchor,positive", label="label")  # the default section of a set
SECTION = ("path", "form", "texts", "label")  # the fields of a section about a set
PROMPTS = ("query_prompt", "document_prompt")  # optional fields of a section of `data.sets`
NO_PROMPT = "none"
WEIGHTS, PROPORTIONAL, TEMPERATURE = SAMPLINGS = "weights", "proportional", "temperature"  # `config.data.sampling`
EXAMPLES, TOKENS = BATCHINGS = "examples", "tokens"  # `config.batch_by`


@dataclasses.dataclass(frozen=True)
class Source:
    """The location and the form of a set: a section of the config, with the fields of `config.data`.

    Attributes:
      forms: the forms by name.
      section: the name of the section, such as data.sets.NAME.
      path: the file or the folder.
      form: the name of a form.
      texts: the columns of the texts, separated by commas.
      label: the column of the label.
      weight: the mean number of uses of an example of a training set per epoch.
      inherited: the fields that are unset in the section and come from `data`.
      ignore_identical_ids: whether the search for a query ignores the document with the same id.
      query_prompt: the prompt of queries, or of all texts of a form without queries; "" for the prompt of `data`,
        `NO_PROMPT` for no prompt.
      document_prompt: the prompt of documents; "" and `NO_PROMPT` as in `query_prompt`.
    """

    forms: ClassVar[Mapping[str, FileForm]] = FORMS
    section: str
    path: str
    form: str
    texts: str
    label: str
    weight: float = 1.0
    inherited: frozenset[str] = frozenset()
    ignore_identical_ids: bool = False
    query_prompt: str = ""
    document_prompt: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of the texts."""
        return tuple(map(str.strip, split_at_commas(self.texts)))

    @property
    def score_columns(self) -> tuple[str, ...]:
        """The columns with a score for each document; only the form pairs has them."""
        return score_columns(self.label) if self.form == "pairs" else ()

    @property
    def has_negatives(self) -> bool:
        """Whether an example has a query, a positive and negatives."""
        return self.form == "pairs" and len(self.columns) > 2

    def prompts(self, prompts: Prompts) -> Prompts:
        """Returns the prompts of the texts of this set, from the prompts of the run."""
        replaced = {
            kind: "" if prompt == NO_PROMPT else prompt
            for kind, prompt in ((QUERY, self.query_prompt), (ANY, self.query_prompt), (DOCUMENT, self.document_prompt))
            if prompt
        }
        return {**prompts, **replaced}

    def setting(self, name: str) -> str:
        """Returns the name and the value of a field as text, for messages."""
        field = f"data.{name}" if name in self.inherited else f"{self.section}.{name}"
        return f"config.{field} = {getattr(self, name)!r}"

    def require(self, ok: bool, name: str, remedy: str) -> None:
        """Raises `UserError` about a field unless `ok`."""
        if not ok:
            raise UserError(f"{self.setting(name)}: {remedy}")

    def validate(self, forms: Collection[str] = ()) -> None:
        """Raises `UserError` for invalid fields, without reading the file.

        Args:
          forms: the allowed forms; all by default.
        """
        forms = forms or self.forms
        self.require(self.form in forms, "form", f"choose one of {', '.join(forms)}")
        form, columns = self.forms[self.form], self.columns
        self.require(
            not form.columns or all(columns), "texts", "must name the columns of the texts, such as anchor,positive"
        )
        self.require(not form.columns or len(columns) in form.columns, "texts", form.needs)
        self.require(self.weight > 0, "weight", "must be above 0; or leave the set out")
        all_texts = f"has no effect with form={self.form}, whose texts all have the query prompt; leave the field out"
        self.require(form.has_queries or not self.document_prompt, "document_prompt", all_texts)
        has_ids = "is for form=search, whose files have ids; leave the field out"
        self.require(not self.ignore_identical_ids or form.has_ids, "ignore_identical_ids", has_ids)

    def file_of(self, parts: Sequence[str]) -> epath.Path:
        """Returns the file of the set, which is one of `parts`, such as train or dev.

        Raises:
          UserError: unless there is exactly one file.
        """
        place, names = epath.Path(self.path), self.forms[self.form].files
        if not place.is_dir():
            self.require(place.is_file(), "path", "no such file or folder; correct the path")
            suffixes = tuple(dict.fromkeys(epath.Path(name).suffix for name in names))
            if place.suffix not in suffixes:
                raise UserError(f"{self.path}: with form={self.form} the name must end in {', '.join(suffixes)}")
            return place
        names = tuple(name.format(part) for part in parts for name in names)
        existing = [name for name in names if (place / name).exists()]
        self.require(bool(existing), "path", f"the folder has no {' or '.join(names)}; add the file")
        self.require(len(existing) == 1, "path", f"the folder has both {existing[0]} and {existing[-1]}; name the file")
        return place / existing[0]


class FlagSource(Source):
    """A set that the flags of a command describe; the path is the flag --data."""

    def setting(self, name: str) -> str:
        """Returns the flag as text."""
        return f"--{'data' if name == 'path' else name}={getattr(self, name)}"


def training_sets(data: ConfigDict) -> dict[str, Source]:
    """Returns the training sets by name. The set of `config.data` has the name "" and comes first."""
    main = Source("data", **{name: data[name] for name in SECTION})
    return {"": main, **{name: Source(f"data.sets.{name}", **fields) for name, fields in data.sets.items()}}


def dev_set(data: ConfigDict) -> Source:
    """Returns the dev set. Unset fields of `data.dev` are the fields of `data`."""
    inherited = frozenset(name for name in SECTION if not data.dev[name])
    fields = {name: (data if name in inherited else data.dev)[name] for name in SECTION}
    ignore = bool(data.dev.get("ignore_identical_ids"))  # Older runs have no such field.
    return Source("data.dev", **fields, inherited=inherited, ignore_identical_ids=ignore)


def shape_of(data: ConfigDict) -> tuple[int, type | None]:
    """Returns the number of texts of the examples of `config.data`, and the type of their values."""
    form = FORMS[data.form]
    return len(split_at_commas(data.texts)) if form.columns.start > 1 else 2, form.value_type


def read_set(source: Source, *parts: str) -> TextSet:
    """Reads a set.

    Args:
      source: the set.
      *parts: names such as train or dev. If the path is a folder, it contains exactly one of these files.

    Raises:
      UserError: for a missing or invalid file.
    """
    return _form(source).read(source.file_of(parts), source.columns, source.label)


def read_search(source: Source, *parts: str, held_out: Collection[str] = ()) -> Search:
    """Reads the queries and the documents of a set that has queries, as `read_set` reads examples.

    Args:
      source: the set.
      *parts: see `read_set`.
      held_out: the queries to return; empty for all queries.
    """
    form, path = _form(source), source.file_of(parts)
    if not form.has_ids:
        if not held_out:
            return form.read_search(path, source.columns, source.label)
        return retrieval.of_texts(part(form.read(path, source.columns, source.label), held_out).texts)
    search = form.read_search(path, source.columns, source.label)
    kept = [i for i, query in enumerate(search.queries) if not held_out or query in held_out]
    fields = {name: [getattr(search, name)[i] for i in kept] for name in ("queries", "relevant", "identical")}
    return search._replace(**fields, ignores_identical_ids=source.ignore_identical_ids)


def _form(source: Source) -> Form:
    return FORMS[source.form]


def part(text_set: TextSet, firsts: Collection[str], is_inside: bool = True) -> TextSet:
    """Returns the examples whose first texts are in `firsts`, or with `is_inside` False all other examples."""
    kept = [number for number, (first, *_) in enumerate(text_set.texts) if (first in firsts) == is_inside]
    values, scores = (None if x is None else x[kept] for x in (text_set.values, text_set.scores))
    return text_set._replace(texts=[text_set.texts[i] for i in kept], values=values, scores=scores)


def read_training_search(path: str, form: str, texts: str) -> Search:
    """Reads the training set of the flags --data, --form and --texts. Raises `UserError` if it has no queries."""
    fields: dict[str, Any] = PAIRS | dict(path=path, form=form, texts=texts)
    source = FlagSource("", **fields)
    source.validate(WITH_QUERIES)
    return read_search(source, "train")


class EncodedTexts(NamedTuple):
    """Texts as ids.

    Attributes:
      examples: the distinct texts, each as one example.
      numbers: `[examples of the set, texts]`, the index in `examples` of each text; for queries and documents, see
        `encode_search`.
      lost: for each distinct text, the number of tokens that were cut off.
    """

    examples: Examples
    numbers: np.ndarray
    lost: Sequence[int] = ()


def encode_set(
    text_set: TextSet, form: str, prompts: Prompts, tokenizer: Tokenizer, max_seq_length: int
) -> EncodedTexts:
    """Encodes the texts of a set, each after a prompt.

    Queries have the prompt `QUERY`, documents the prompt `DOCUMENT`, and the texts of sets without queries `ANY`.
    """
    kinds = (QUERY, DOCUMENT) if FORMS[form].has_queries else (ANY, ANY)
    texts = (prompts[kinds[i > 0]] + text for example in text_set.texts for i, text in enumerate(example))
    encoded = _encode_texts(texts, tokenizer, max_seq_length)
    return encoded._replace(numbers=encoded.numbers.reshape(len(text_set.texts), -1))


def encode_search(search: Search, prompts: Prompts, tokenizer: Tokenizer, max_seq_length: int) -> EncodedTexts:
    """Encodes queries and documents, each after its prompt. `numbers` are `[queries + documents]`, queries first."""
    sides = ((QUERY, search.queries), (DOCUMENT, search.documents))
    texts = (prompts[kind] + text for kind, texts in sides for text in texts)
    return _encode_texts(texts, tokenizer, max_seq_length)


def _encode_texts(texts: Iterable[str], tokenizer: Tokenizer, max_seq_length: int) -> EncodedTexts:
    numbers, distinct_texts = number_texts(texts)
    input_ids, token_types, lost = encode_pairs(tokenizer, distinct_texts, None, max_seq_length)
    return EncodedTexts(Examples(input_ids, token_types), numbers, lost)


def training_examples(encoded: EncodedTexts, labels: np.ndarray, equal_tokens: bool = False) -> Examples:
    """Returns examples of several texts each, with the labels of `TextSet.labels`; `equal_tokens` as in `Examples`."""
    numbers = encoded.numbers
    input_ids, token_types = (
        [arrays[i] for i in numbers.ravel()] for arrays in (encoded.examples.input_ids, encoded.examples.token_types)
    )
    return Examples(input_ids, token_types, labels, choices=numbers.shape[1], equal_tokens=equal_tokens)

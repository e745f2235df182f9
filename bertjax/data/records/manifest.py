"""The manifest of a folder of records: the files, and the recipe and the sources of the records."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from etils import epath

from bertjax.common.files import read_json, write_whole
from bertjax.text import tokenizer

MANIFEST = "manifest.json"

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class TokenizerEntry(TypedDict):
    """The tokenizer of the records."""

    kind: tokenizer.Kind
    lowercase: bool
    vocab_size: Count
    fingerprint: str


class FileEntry(TypedDict):
    """A file of records, as `write_records` and `lengths.write_lengths` return it. Older manifests lack some fields."""

    records: Count
    bytes: NotRequired[Count]
    crc32c: NotRequired[Count]
    head_crc32c: NotRequired[Count]
    lengths_crc32c: NotRequired[Count]
    source: NotRequired[str]  # the source of all records in the file, if the corpus has several sources


class SetEntry(TypedDict):
    """The records of one sequence length: {path relative to the folder: entry, or the number of records}."""

    max_predictions_per_seq: Count
    train: dict[str, FileEntry | Count]
    heldout: dict[str, FileEntry | Count]


class Manifest(TypedDict):
    """The content of `MANIFEST`, from `preparation.manifest_of`."""

    recipe: dict[str, Any]
    layout: NotRequired[Literal["google", "compact"]]
    tokenizer: TokenizerEntry
    sets: dict[str, SetEntry]
    corpus: NotRequired[dict[str, int]]  # counts of documents and lines that were read or omitted
    sources: NotRequired[dict[str, dict[str, int]]]
    files: NotRequired[dict[str, dict[str, Any]]]  # {source: numbers of files}, see `preprocessing.summary`
    unknown_words: NotRequired[dict[str, list[str]]]  # {source: its most frequent unknown words}
    read: NotRequired[dict[str, dict[str, Any]]]  # {source: `corpus.Extent`}
    cleaning: NotRequired[dict[str, int]]
    real_tokens_share: NotRequired[dict[str, float]]  # {length: fraction of tokens that are not padding}


def read_manifest(folder: epath.PathLike) -> Manifest | None:
    """Returns the manifest of a folder of records; None if there is no manifest, as for records of Google's code."""
    path = epath.Path(folder) / MANIFEST
    return read_json(path, Manifest, "prepare the records again") if path.exists() else None


def training_shares(folder: epath.PathLike) -> dict[str, float]:
    """Returns {source: fraction of the characters of the training text}; {} if the manifest has no sources."""
    manifest = read_manifest(folder)
    sources = manifest.get("sources", {}) if manifest else {}
    total = sum(source["characters"] for source in sources.values())
    return {name: source["characters"] / total for name, source in sources.items()} if total else {}


def fingerprint(folder: epath.PathLike) -> str:
    """Returns a hash of the files and the tokenizer in the manifest, or else of the names and sizes of the files."""
    content: list[Any]
    if manifest := read_manifest(folder):
        content = [manifest["sets"], manifest["tokenizer"]["fingerprint"]]
    else:
        paths = [*epath.Path(folder).glob("*"), *epath.Path(folder).glob("length*/*")]
        content = sorted([path.name, path.stat().length] for path in paths if "tfrecord" in path.name.lower())
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def write_manifest(folder: epath.PathLike, manifest: Mapping) -> None:
    """Writes the manifest. Call this last: a folder with a manifest is complete."""
    write_whole(epath.Path(folder) / MANIFEST, json.dumps(manifest, indent=1) + "\n")

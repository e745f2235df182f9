"""The manifest of a folder of records: what they were made from, and how, and which files there are."""

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
    kind: tokenizer.Kind
    lowercase: bool
    vocab_size: Count
    fingerprint: str


class FileEntry(TypedDict):
    """A file of records; the manifests of older versions have less than `write_records` and `lengths.write` return."""

    records: Count
    bytes: NotRequired[Count]
    crc32c: NotRequired[Count]
    head_crc32c: NotRequired[Count]
    lengths_crc32c: NotRequired[Count]
    source: NotRequired[str]  # only of files that have one of several sources


class SetEntry(TypedDict):
    """The records of one length: their files by path, relative to the folder."""

    max_predictions_per_seq: Count
    train: dict[str, FileEntry | Count]
    heldout: dict[str, FileEntry | Count]


class Manifest(TypedDict):
    """What `MANIFEST` says of a folder of records; `preparation.manifest_of` makes it."""

    recipe: dict[str, Any]
    layout: NotRequired[Literal["google", "compact"]]
    tokenizer: TokenizerEntry
    sets: dict[str, SetEntry]
    corpus: NotRequired[dict[str, int]]  # what was read and left out
    sources: NotRequired[dict[str, dict[str, int]]]
    files: NotRequired[dict[str, dict[str, Any]]]  # source -> how many files were read or not, see `summary`
    unknown_words: NotRequired[dict[str, list[str]]]  # source -> the most frequent ones
    read: NotRequired[dict[str, dict[str, Any]]]  # source -> `corpus.Extent`
    cleaning: NotRequired[dict[str, int]]
    real_tokens_share: NotRequired[dict[str, float]]  # length -> share in training sequences


def read_manifest(folder: epath.PathLike) -> Manifest | None:
    """Returns the manifest of a folder of records; None if it has none, as records from Google's code do."""
    path = epath.Path(folder) / MANIFEST
    return read_json(path, Manifest, "prepare the records again") if path.exists() else None


def training_shares(folder: epath.PathLike) -> dict[str, float]:
    """Returns the share of each source in the text that is trained on; empty if the manifest does not say it."""
    sources = (read_manifest(folder) or {}).get("sources", {})
    total = sum(source["characters"] for source in sources.values())
    return {name: source["characters"] / total for name, source in sources.items()} if total else {}


def fingerprint(folder: epath.PathLike) -> str:
    """Returns a hash that changes if the records become others: of what the manifest says, or of names and sizes."""
    if manifest := read_manifest(folder):
        content = [manifest["sets"], manifest["tokenizer"]["fingerprint"]]
    else:
        paths = [*epath.Path(folder).glob("*"), *epath.Path(folder).glob("length*/*")]
        content = sorted([path.name, path.stat().length] for path in paths if "tfrecord" in path.name.lower())
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def write_manifest(folder: epath.PathLike, manifest: Mapping) -> None:
    """Writes the manifest. Call this last: a folder with a manifest is complete."""
    write_whole(epath.Path(folder) / MANIFEST, json.dumps(manifest, indent=1) + "\n")

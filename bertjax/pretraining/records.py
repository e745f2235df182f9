"""Finds the records of a run and the tokenizer of the records, or prepares the records in the workdir."""

from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.lists import corpus_sources
from bertjax.data.preprocessing import preparation, summary, vocabulary
from bertjax.data.records.manifest import fingerprint, read_manifest
from bertjax.data.records.record_sets import require_folder
from bertjax.distributed.topology import available_cores
from bertjax.interop import initialization
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints.workdir import RunInfo


def find_or_prepare(config: ConfigDict, workdir: epath.Path, is_new: bool = True) -> tuple[epath.Path, Tokenizer]:
    """Returns the folder of the records and the tokenizer of the records.

    If `data.records` is empty, uses or prepares records in the workdir.

    Args:
      config: the whole config.
      workdir: the folder of the run. The run prepares records in the subfolder `records`.
      is_new: whether the run is new. A resumed run keeps its records even if the corpus has changed.

    Raises:
      UserError: if the records are missing or do not match the config; for a new run also if the corpus has changed
        since the records were prepared in the workdir.
    """
    folder = require_folder(config.data.records) if config.data.records else workdir / "records"
    manifest: Mapping[str, Any] | None = read_manifest(folder)
    if manifest is not None:
        _check_manifest(config, manifest, folder, is_new)
    elif config.data.records:
        _check_google_records(config, folder)
    elif jax.process_count() > 1:
        raise UserError(
            "config.data.records = '': runs on several hosts need prepared records; run bertjax.prepare on one host, "
            "and set data.records to its output folder"
        )
    else:
        print(f"preparing {', '.join(corpus_sources(config))} in {folder}", flush=True)
        manifest = preparation.prepare(config, folder, workers=available_cores())
    return folder, _tokenizer_of_records(config, folder, manifest)


def changes_of_data(config: ConfigDict, workdir: epath.Path, previous: RunInfo) -> list[str]:
    """Returns clauses about changes of the records or the corpus since a run finished. Ignores missing data."""
    folder = epath.Path(config.data.records or workdir / "records")
    recorded = (previous.fingerprints or {}).get("records")
    changes = []
    if recorded and folder.is_dir() and fingerprint(folder) != recorded:
        changes.append(f"the records in {folder} have changed")
    if not config.data.records and (manifest := read_manifest(folder)):
        changes += preparation.changes_of_corpus(config, manifest)
    return changes


def _check_manifest(config: ConfigDict, manifest: Mapping[str, Any], folder: epath.Path, is_new: bool) -> None:
    """Prints the warnings of the manifest. Raises `UserError` if the config or the corpus differs from the manifest."""
    is_in_workdir, is_first_host = not config.data.records, jax.process_index() == 0
    if is_in_workdir and is_first_host:
        print(f"using the prepared records in {folder}", flush=True)
    preparation.check_recipe(config, manifest, folder)
    changes = preparation.changes_of_corpus(config, manifest) if is_in_workdir else []
    if changes and is_new:
        raise UserError(
            f"config.data.corpus: changed since the records in {folder} were prepared ({'; '.join(changes)}); delete "
            f"the folder to prepare the records again, or set --config.data.records={folder} to train on "
            f"the old records"
        )
    if not is_first_host:
        return
    if changes:
        print(f"data.corpus: {'; '.join(changes)}; training continues on the old records", flush=True)
    for line in summary.warnings_of(manifest) if is_new else ():
        print(line, flush=True)


def _check_google_records(config: ConfigDict, folder: epath.Path) -> None:
    """Raises `UserError` unless the config matches records of Google's create_pretraining_data.py."""
    for field, value, needed in (
        ("next_sentence", config.data.next_sentence, "pairs"),
        ("masking", config.data.masking, "static"),
    ):
        if value != needed:
            raise UserError(
                f"config.data.{field} = {value!r}: the records in {folder} have no manifest, and are read as records "
                f"of Google's create_pretraining_data.py, which need {needed}; set --config.data.{field}={needed}, or "
                f"prepare records with bertjax.prepare"
            )
    if not config.tokenizer.path:
        raise UserError(
            f"config.tokenizer.path = '': the records in {folder} have no manifest; set the path of the "
            f"vocabulary with which the records were made"
        )


def _tokenizer_of_records(config: ConfigDict, folder: epath.Path, manifest: Mapping[str, Any] | None) -> Tokenizer:
    """Loads the tokenizer of the records. Raises `UserError` if `config.tokenizer` is another tokenizer."""
    entry = manifest["tokenizer"] if manifest else dict(config.tokenizer)
    is_in_folder = config.tokenizer.extend or not config.tokenizer.path
    path = folder / tokenizer.KINDS[entry["kind"]].filename if is_in_folder else config.tokenizer.path
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    if is_in_folder:
        kind, lowercase = entry["kind"], entry["lowercase"]
    loaded = tokenizer.load_tokenizer(kind, path, lowercase)
    if manifest and loaded.fingerprint != entry["fingerprint"]:
        raise UserError(
            f"config.tokenizer: the records in {folder} were made with another tokenizer ({entry['kind']}, "
            f"lowercase = {entry['lowercase']}, {entry['vocab_size']} tokens); set tokenizer.path = '' to use "
            f"the tokenizer of the records"
        )
    if not config.tokenizer.path:
        initialization.check_flags(config, loaded, f"the records in {folder}")
    vocabulary.check_vocab_size(config, loaded, path)
    return loaded

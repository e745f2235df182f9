"""The records of a run and their tokenizer: finds them, or prepares them in the workdir."""

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
from bertjax.interop import pretrained
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints.workdir import RunInfo


def find_or_prepare(config: ConfigDict, workdir: epath.Path, is_new: bool = True) -> tuple[epath.Path, Tokenizer]:
    """Returns the folder of the records and their tokenizer. Prepares the records if the config names no folder.

    Args:
      config: the whole config.
      workdir: the folder of the run, which also holds records that the run prepares.
      is_new: whether the run is new. A resumed run continues with records of an older corpus.

    Raises:
      UserError: if the records are missing or do not match the config; for a new run also if the corpus has changed
        since the records were prepared in the workdir.
    """
    folder = require_folder(config.data.records) if config.data.records else workdir / "records"
    manifest: Mapping[str, Any] | None = read_manifest(folder)
    if manifest is not None:
        _check_recipe(config, manifest, folder, is_new)
    elif config.data.records:
        _check_google_records(config, folder)
    elif jax.process_count() > 1:
        raise UserError(
            "config.data.records = '': runs on several hosts need records; run bertjax.prepare on one host first"
        )
    else:
        print(f"preparing {', '.join(corpus_sources(config))} in {folder}", flush=True)
        manifest = preparation.prepare(config, folder, workers=available_cores())
    return folder, _tokenizer_of_records(config, folder, manifest)


def changes_of_data(config: ConfigDict, workdir: epath.Path, before: RunInfo) -> list[str]:
    """Returns clauses about records or a corpus that have changed since a run finished. Missing data is unchanged."""
    folder, known = epath.Path(config.data.records or workdir / "records"), (before.fingerprints or {}).get("records")
    changes = []
    if known and folder.is_dir() and fingerprint(folder) != known:
        changes.append(f"the records in {folder} are others")
    if not config.data.records and (manifest := read_manifest(folder)):
        changes += preparation.changes_of_corpus(config, manifest)
    return changes


def _check_recipe(config: ConfigDict, manifest: Mapping[str, Any], folder: epath.Path, is_new: bool) -> None:
    """Checks records with a manifest, and prints the warnings of their preparation. Raises `UserError`."""
    is_prepared_here, is_first_host = not config.data.records, jax.process_index() == 0
    if is_prepared_here and is_first_host:
        print(f"found prepared records in {folder}", flush=True)
    preparation.check_recipe(config, manifest, folder)
    changes = preparation.changes_of_corpus(config, manifest) if is_prepared_here else []
    if changes and is_new:
        raise UserError(
            f"data.corpus: since the records in {folder} were prepared, {'; '.join(changes)}; delete the folder to "
            f"prepare it anew, or set --config.data.records={folder} to train on it as it is"
        )
    if not is_first_host:
        return
    if changes:
        print(f"data.corpus: {'; '.join(changes)}; going on with the records of before", flush=True)
    for line in summary.warnings_of(manifest) if is_new else ():
        print(line, flush=True)


def _check_google_records(config: ConfigDict, folder: epath.Path) -> None:
    """Raises `UserError` unless the config suits records of Google's create_pretraining_data.py."""
    for field, value, needed, kind in (
        ("next_sentence", config.data.next_sentence, "pairs", "pairs"),
        ("masking", config.data.masking, "static", "masked"),
    ):
        if value != needed:
            raise UserError(
                f"config.data.{field} = {value!r}: the records in {folder} have no manifest, and are taken for "
                f"Google's, which are {kind}; set --config.data.{field}={needed}, or use bertjax.prepare"
            )
    if not config.tokenizer.path:
        raise UserError(
            f"config.tokenizer.path = '': the records in {folder} have no manifest; set the vocabulary that they "
            f"were made with"
        )


def _tokenizer_of_records(config: ConfigDict, folder: epath.Path, manifest: Mapping[str, Any] | None) -> Tokenizer:
    """Loads the tokenizer of the records. Raises `UserError` if the config names another one."""
    made_with = manifest["tokenizer"] if manifest else dict(config.tokenizer)
    is_in_folder = config.tokenizer.extend or not config.tokenizer.path
    path = folder / tokenizer.KINDS[made_with["kind"]].filename if is_in_folder else config.tokenizer.path
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    if is_in_folder:
        kind, lowercase = made_with["kind"], made_with["lowercase"]
    loaded = tokenizer.load(kind, path, lowercase)
    if manifest and loaded.fingerprint != made_with["fingerprint"]:
        raise UserError(
            f"config.tokenizer: the records in {folder} were made with another tokenizer ({made_with['kind']}, "
            f"lowercase = {made_with['lowercase']}, {made_with['vocab_size']} pieces); leave tokenizer.path empty to "
            f"use theirs"
        )
    if not config.tokenizer.path:
        pretrained.check_flags(config, loaded, f"the records in {folder}")
    vocabulary.check_vocab_size(config, loaded, path)
    return loaded

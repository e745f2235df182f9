"""Converts a corpus to TFRecords in several processes, with bounded memory.

The bytes of the output do not depend on the number of processes. A killed preparation continues when it is started
again.

If duplicates are removed, a pass before the first pass (`cleaning`) finds the duplicates.

First pass (`blocks`): workers tokenize blocks of documents, make sequences and mask the sequences. The seeds of the
random generators depend on the block. Each sequence has a random key; the sequences of a block are written to disk in
the order of the keys. The files of many blocks are merged into few files (`common.sorting`).

Second pass (`shards`): a shard contains the sequences in a range of keys. Workers gather the sequences of a shard from
all files, and write the sequences in the order of the keys, which shuffles them. A worker holds one block or shard at
most.
"""

import collections
import functools
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath
from ml_collections import ConfigDict

from bertjax.common import lock
from bertjax.common.errors import UserError
from bertjax.common.progress import Bar, describe_bytes, phase
from bertjax.common.sorting import merge_until_few
from bertjax.common.workers import in_order, worker_pool
from bertjax.config.defaults import pretraining_config
from bertjax.config.lists import corpus_sources, join_with_commas
from bertjax.config.stages import stages_of
from bertjax.data.corpus import cleaning, corpus
from bertjax.data.corpus.corpus import Group
from bertjax.data.corpus.selection import SPLITS, Selection, is_train, selection_of, with_repeats
from bertjax.data.preprocessing import blocks, shards, summary, vocabulary
from bertjax.data.preprocessing.job import UNFINISHED, Job, PartAndShape, RecordShape
from bertjax.data.preprocessing.rows import row_type
from bertjax.data.records.manifest import MANIFEST, write_manifest
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer

RECIPE_FIELDS = (
    "seed", "language", "split_sentences", "heldout_fraction", "dupe_factor", "mixture", "short_seq_prob",
    "next_sentence", "masking", "text_column", "document", "mix_when", "stream",
)  # fmt: skip
MASKING_FIELDS = ("masked_lm_prob", "masked_lm_split", "do_whole_word_mask", "do_span_mask")
VERSION = 3  # version of the records: increase it if the same config gives other records or counts
STREAM_VERSION = 5  # version of the records of a stream of text


def recipe_of(config: ConfigDict) -> dict:
    """Returns the config fields that determine the records, except the tokenizer and the lengths."""
    fields = RECIPE_FIELDS + (MASKING_FIELDS if config.data.masking == "static" else ())
    recipe = {"corpus": list(corpus_sources(config)), **{name: config.data[name] for name in fields}}
    if config.data.mix_when == "read":
        recipe["mixture"] = ""
    recipe |= {f"cleaning.{name}": value for name, value in config.data.cleaning.items()}
    return json.loads(json.dumps(recipe))  # the same types as in the manifest


def check_recipe(config: ConfigDict, manifest: Mapping, folder: epath.PathLike) -> None:
    """Raises `UserError` if the records were prepared with another recipe. The message has the flags of the records."""
    recipe = recipe_of(config)
    if not recipe["corpus"]:  # the config does not set the corpus
        del recipe["corpus"], recipe["mixture"]
    prepared = {**recipe_of(pretraining_config()), **manifest["recipe"]}  # older manifests do not have all fields
    if wrong := {name: prepared.get(name) for name, value in recipe.items() if prepared.get(name) != value}:
        name, made_with = next(iter(wrong.items()))
        flags = " ".join(
            f"--config.data.{field}={join_with_commas(value) if isinstance(value, list) else value}"
            for field, value in wrong.items()
        )
        raise UserError(
            f"config.data.{name} = {recipe[name]!r}: the records in {folder} were prepared with {made_with!r}; set "
            f"{flags}, or prepare new records in another folder"
        )


def changes_of_corpus(config: ConfigDict, manifest: Mapping) -> list[str]:
    """Returns descriptions of the sources that have changed since the preparation; ignores missing sources."""
    changes = []
    for source, extent in manifest.get("read", {}).items():
        try:
            now = corpus.extents(corpus.corpus_portions([source]))[source]
        except UserError:
            continue
        before = corpus.Extent(**extent)
        if now.identity != before.identity:
            sizes = f"{now}, was {before}" if str(now) != str(before) else f"{now} as before, but modified since"
            changes.append(f"{source} has changed ({sizes})")
    return changes


def prepare(
    config: ConfigDict, output: epath.PathLike, workers: int = 1, beam_options: Sequence[str] | None = None
) -> dict:
    """Writes the records of every stage of `config`, the tokenizer and the manifest.

    Loads the tokenizer from `config.tokenizer.path`. If the path is empty, learns a tokenizer from the training
    documents.
    Continues a killed preparation of the same config and corpus. Writes the manifest last.

    Args:
      config: the whole config.
      output: the folder for the records.
      workers: the number of processes on this machine.
      beam_options: the options of Apache Beam pipelines, such as `--runner=...`; None prepares on this machine.

    Returns:
      The manifest.

    Raises:
      UserError: `output` already has a manifest, or the corpus has too few documents.
    """
    if workers < 1:
        raise UserError(f"--workers={workers}: must be at least 1")
    output = folder_for(output)
    began = time.time()
    selection = selection_of(config)
    groups = corpus.groups(list(selection.weights))
    phase(f"reading {_describe(groups)}")
    loaded = vocabulary.tokenizer_of_config(config)
    with lock.held(output, "--output"):
        folder_for(output)  # checks again, because another preparation may have ended since the first check
        if beam_options is None:
            prepared = prepare_here(config, output, groups, selection, loaded, workers)
        else:
            prepared = prepare_on_beam(config, output, groups, selection, loaded, beam_options)
        manifest = manifest_of(config, prepared, groups)
        shards.delete_others(output, manifest["sets"])
        write_manifest(output, manifest)
        epath.Path(prepared.job.work).parent.rmtree()
    print_preparation(manifest, time.time() - began)
    return manifest


def _describe(groups: Sequence[Group]) -> str:
    """Describes the corpus: "12 files, 3.0 MB". Names the sources that are not files."""
    portions = [portion for group in groups for portion in group.portions]
    files, size = sum(len(portion.files) for portion in portions), sum(portion.bytes for portion in portions)
    names = [portion.source for portion in portions if not portion.files]
    parts = [*names, *([f"{files:,} file{'s' * (files > 1)}"] if files else [])]
    skipped = sum(count for portion in portions for count, _ in portion.unread.values())
    note = f"; {skipped:,} other file{'s have names' if skipped > 1 else ' has a name'} that prepare does not read"
    return ", ".join(parts + ([describe_bytes(size)] if size else [])) + note * (skipped > 0)


def folder_for(output: epath.PathLike) -> epath.Path:
    """Returns the folder as a path. Raises `UserError` if records cannot be written there."""
    if not str(output):
        raise UserError("--output: set it to a folder")
    try:
        output = epath.Path(output)
    except KeyError as error:
        raise UserError(
            f"--output={output}: storage {error} is not supported; use a folder, gs://... or s3://..."
        ) from None
    if (output / MANIFEST).exists():
        raise UserError(f"{output} already contains finished records; delete the folder, or choose another")
    return output


class Prepared(NamedTuple):
    """The result of a preparation.

    Attributes:
      job: the settings of the workers.
      totals: statistics of the documents, by split.
      counts: the counts of `Selection.read`.
      written: the entry of each shard in the manifest.
    """

    job: Job
    totals: Mapping[str, int]
    counts: Mapping
    written: Mapping[shards.Shard, dict]


def prepare_here(
    config: ConfigDict,
    output: epath.Path,
    groups: list[Group],
    selection: Selection,
    loaded: Tokenizer | None,
    workers: int,
) -> Prepared:
    """Prepares the records in processes of this machine."""
    corpus_identity = identity_of_corpus(groups)
    work, ahead = unfinished(output, records_identity(config, loaded), corpus_identity), 2 * workers
    with worker_pool(workers) as pool:
        corpus_work = os.path.join(work, f"corpus-{corpus_identity}")  # files that depend on the whole text
        os.makedirs(corpus_work, exist_ok=True)
        selection = with_repeats(selection, groups, corpus_work, pool, ahead)
        used = loaded or learnt_tokenizer(config, groups, selection, corpus_work, pool, ahead)
        used.save(output)
        job = job_of(config, used, output, work)
        totals, counts, rows, paths = spill_all(job, groups, selection, pool, ahead)
        check_contents(config, totals, counts, rows)
        return Prepared(job, totals, counts, write_all(job, rows, paths, pool, ahead))


def prepare_on_beam(
    config: ConfigDict,
    output: epath.Path,
    groups: list[Group],
    selection: Selection,
    loaded: Tokenizer | None,
    options: Sequence[str],
) -> Prepared:
    """Prepares the records with Apache Beam."""
    from bertjax.data.preprocessing import beam  # its import takes seconds

    work = output / UNFINISHED / "beam"
    if work.exists():
        work.rmtree()
    repeats = beam.find_repeats(selection, groups, work, options)
    used = loaded or beam.learn_tokenizer(config, groups, selection, repeats, work, options)
    used.save(output)
    job = job_of(config, used, output, str(work))
    totals, counts, written = beam.write_all(job, groups, selection, repeats, options)
    rows: collections.Counter[PartAndShape] = collections.Counter()
    for shard, entry in written.items():
        rows[shard.part, shard.shape] += entry["records"]
    check_contents(config, totals, counts, rows)
    return Prepared(job, totals, counts, written)


def records_identity(config: ConfigDict, loaded: Tokenizer | None) -> str:
    """Returns a hash that changes if the records of the same text may change."""
    version = STREAM_VERSION if config.data.stream else VERSION
    content = [version, recipe_of(config), config.data.layout, [list(shape) for shape in shapes(config)]]
    content += [loaded.fingerprint if loaded else [_vocabulary_recipe(config), config.model.vocab_size]]
    return _hash(json.dumps(content, sort_keys=True))


def _vocabulary_recipe(config: ConfigDict) -> dict:
    """Returns the fields that determine a learnt or extended vocabulary."""
    fields = config.tokenizer.to_dict()
    if not fields.pop("extend"):
        return fields
    base = tokenizer.load_tokenizer(fields["kind"], fields["path"], fields["lowercase"])
    return fields | {"extend": config.tokenizer.extend, "path": base.fingerprint}


def identity_of_corpus(groups: Sequence[Group]) -> str:
    """Returns a hash that changes if the text may have changed."""
    return _hash("\n".join(group.identity for group in groups))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shapes(config: ConfigDict) -> tuple[RecordShape, ...]:
    """Returns the shapes of the records of all stages of pre-training, one for each length."""
    most: dict[int, int] = {}
    for stage in stages_of(config):
        most[stage.length] = max(stage.max_predictions_per_seq, most.get(stage.length, 0))
    return tuple(RecordShape(*shape) for shape in most.items())


def unfinished(output: epath.Path, identity: str, corpus_identity: str) -> str:
    """Creates the local folder for files between the passes: in the output, or in TMPDIR for a remote output.

    Keeps blocks of a stopped run with the same identity, and deletes files of other runs. If the corpus has changed,
    keeps blocks with the same text.

    Args:
      output: the folder for the records.
      identity: the hash of `records_identity`.
      corpus_identity: the hash of `identity_of_corpus`.
    """
    if "://" not in str(output):
        folder = output / UNFINISHED
    else:
        folder = epath.Path(tempfile.gettempdir()) / f"bertjax-{_hash(str(output))}"
    work = folder / identity
    if work.exists():
        print(f"continuing the unfinished preparation in {output}", flush=True)
    elif folder.exists():
        folder.rmtree()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / f"corpus-{corpus_identity}").exists():
        blocks.keep_unmerged(str(work))
    return str(work)


def learnt_tokenizer(
    config: ConfigDict, groups: list[Group], selection: Selection, work: str, pool: Any, ahead: int
) -> Tokenizer:
    """Learns the tokenizer and saves it in the folder `work`, or loads it from there."""
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    saved = epath.Path(work) / tokenizer.KINDS[kind].filename
    if saved.exists():
        return tokenizer.load_tokenizer(kind, saved, lowercase)
    learnt = vocabulary.learn_tokenizer(config, groups, selection, work, pool, ahead)
    learnt.save(work)
    return learnt


def job_of(config: ConfigDict, used: Tokenizer, output: epath.Path, work: str) -> Job:
    """Returns the settings of the workers for a config and the used tokenizer."""
    return Job(
        shapes=shapes(config),
        data=config.data.to_dict(),
        sources=tuple(selection_of(config).weights),
        vocab_size=used.vocab_size,
        fingerprint=used.fingerprint,
        tokenizer=(("kind", used.kind), ("path", str(output / used.filename)), ("lowercase", used.lowercase)),
        work=work,
        output=str(output),
    )


def spill_all(
    job: Job, groups: list[Group], selection: Selection, pool: Any, ahead: int
) -> tuple[Mapping[str, int], Mapping, Mapping[PartAndShape, int], Mapping[PartAndShape, list[str]]]:
    """Writes the blocks of the whole corpus to disk.

    Returns:
      The statistics by split; the counts of `Selection.read`; the number of rows and the files of each part and shape
      in the order of the corpus.
    """
    totals: collections.Counter[str] = collections.Counter()
    counts: collections.Counter = collections.Counter()
    rows: collections.Counter[PartAndShape] = collections.Counter()
    paths: dict[PartAndShape, list[str]] = collections.defaultdict(list)
    done = []
    function = functools.partial(blocks.spill, job=job)
    lengths = " and ".join(str(shape.length) for shape in job.shapes)
    phase(f"converting the text to sequences of {lengths} tokens")
    with Bar("converting the text", [group.bytes for group in groups]) as bar:
        for spilled in in_order(pool, function, blocks.read_blocks(groups, selection, counts), ahead):
            totals.update(blocks.of_split(spilled.part, spilled.stats, job))
            for shape, count, path in zip(job.shapes, spilled.rows, spilled.paths):
                rows[spilled.part, shape] += count
                paths[spilled.part, shape].append(path)
            done.append(spilled)
            bar.update(spilled.stats["bytes"])
    blocks.delete_other_blocks(job.work, done)
    return totals, counts, rows, paths


def write_all(
    job: Job, rows: Mapping[PartAndShape, int], paths: Mapping[PartAndShape, list[str]], pool: Any, ahead: int
) -> dict[shards.Shard, dict]:
    """Writes all shards; returns their entries in the manifest. `spill_all` returns `rows` and `paths`."""
    phase("shuffling the sequences and writing the records")
    merged = {
        (part, shape): merge_until_few(files, row_type(shape, job), pool, ahead)
        for (part, shape), files in paths.items()
    }
    wanted = shards.shards_of(job, rows)
    function, parts = functools.partial(shards.write_shard, job=job), ((s, merged[s.part, s.shape]) for s in wanted)
    with Bar("writing the records", [len(wanted)], " files") as bar:
        written = {}
        for shard, entry in zip(wanted, in_order(pool, function, parts, ahead)):
            written[shard] = entry
            bar.update()
    return written


def manifest_of(config: ConfigDict, prepared: Prepared, groups: Sequence[Group]) -> dict:
    """Returns the manifest of prepared records."""
    job, totals, counts, written = prepared
    return {
        "recipe": recipe_of(config),
        "layout": config.data.layout,
        "tokenizer": {
            **{name: value for name, value in job.tokenizer if name != "path"},
            "vocab_size": job.vocab_size,
            "fingerprint": job.fingerprint,
        },
        **summary.counts_of(totals, counts, groups, [*selection_of(config).weights], [s.length for s in job.shapes]),
        "read": {
            source: extent._asdict()
            for source, extent in corpus.extents(portion for group in groups for portion in group.portions).items()
        },
        "real_tokens_share": {str(shape.length): _real_tokens_share(shape, totals, written) for shape in job.shapes},
        "sets": shards.sets_of(written, job),
    }


def _real_tokens_share(shape: RecordShape, totals: Mapping, written: Mapping[shards.Shard, dict]) -> float:
    """Returns the share of the tokens of training sequences that are not padding."""
    rows = sum(entry["records"] for shard, entry in written.items() if shard.shape == shape and is_train(shard.part))
    return round(totals[f"train_tokens_of_{shape.length}"] / (rows * shape.length), 4)


def print_preparation(manifest: dict, seconds: float) -> None:
    """Prints the summary of a preparation."""
    totals = manifest["corpus"]
    characters = totals["train_characters"] + totals["heldout_characters"]
    written = sum(file["records"] for files in manifest["sets"].values() for s in SPLITS for file in files[s].values())
    print(
        f"prepared {written:,} records from {totals['train_documents']:,} training and "
        f"{totals['heldout_documents']:,} held-out documents: {characters / 1e6:.1f} M characters in {seconds:.0f} s, "
        f"{characters / 1e6 / seconds:.2f} M/s",
        flush=True,
    )
    for line in summary.summary_lines(manifest):
        print(line, flush=True)


def check_contents(config: ConfigDict, totals: Mapping, counts: Mapping, rows: Mapping[PartAndShape, int]) -> None:
    """Raises `UserError` if there is too little text for training or evaluation."""
    train, heldout = totals["train_documents"], totals["heldout_documents"]
    is_pairs = config.data.next_sentence == "pairs"
    needs = "next-sentence prediction needs at least two" if is_pairs else "at least one is needed"
    train_parts = {part for part, _ in rows if is_train(part)}
    if not all(any(rows[part, shape] for part in train_parts) for shape in shapes(config)):
        sources, left = (
            ", ".join(corpus_sources(config)),
            cleaning.describe_changes(counts) + summary.unused(totals, counts),
        )
        ends = {"file": "a file is", "line": "a line is"}.get(config.data.document, "a blank line ends")
        one = ", --config.data.next_sentence=none at least one" * is_pairs
        raise UserError(
            f"data.corpus: {sources} has {train} document{'s' * (train != 1)} for training; {needs}{one} ({ends} a "
            f"document){left}"
        )
    heldout_parts = {part for part, _ in rows if not is_train(part)}
    all_held_out = all(any(rows[part, shape] for part in heldout_parts) for shape in shapes(config))
    if config.data.heldout_fraction and not all_held_out:
        needs += " of one source" * (len(heldout_parts) > 1)
        enough = min(0.5, math.ceil(100 * 6 / (train + heldout)) / 100)  # six documents, because the choice is random
        raise UserError(
            f"config.data.heldout_fraction = {config.data.heldout_fraction}: {heldout} of {train + heldout} "
            f"documents are held out, but {needs}; set --config.data.heldout_fraction={enough:g} or 0"
        )

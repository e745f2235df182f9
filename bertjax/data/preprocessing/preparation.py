"""Converts a corpus to TFRecords in several processes, with bounded memory.

The output does not depend on the number of processes, byte for byte. A preparation that is killed continues where it
was when it is started again.

First pass (`blocks`): workers tokenize blocks of documents, make sequences and mask them, with random generators of
the block's own, give each a random key, and write them to disk in the order of their keys. The files of many blocks
are merged into few (`runs`). Second pass (`shards`): each shard is a range of keys; workers gather it from all files
and write it in the order of the keys, which shuffles. A worker never holds more than one block or one shard. If
duplicates are to be left out, a pass before (`cleaning`) finds them.
"""

import collections
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from etils import epath

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
from bertjax.data.preprocessing.job import UNFINISHED, Job, RecordShape
from bertjax.data.preprocessing.rows import row_type
from bertjax.data.records import record_sets
from bertjax.data.records.manifest import MANIFEST, write_manifest
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer

RECIPE_FIELDS = (
    "seed", "language", "split_sentences", "heldout_fraction", "dupe_factor", "mixture", "short_seq_prob",
    "next_sentence", "masking", "text_column", "document", "mix_when", "stream",
)  # fmt: skip
MASKING_FIELDS = ("masked_lm_prob", "masked_lm_split", "do_whole_word_mask", "do_span_mask")
VERSION = 3  # version of the records: increased if the same config gives other records, or other counts
STREAM_VERSION = 5  # the same, where the records are a stream of text


def recipe_of(config) -> dict:
    """Returns the config fields that determine the records, besides tokenizer and lengths."""
    fields = RECIPE_FIELDS + (MASKING_FIELDS if config.data.masking == "static" else ())
    recipe = {"corpus": list(corpus_sources(config)), **{name: config.data[name] for name in fields}}
    if config.data.mix_when == "read":
        recipe["mixture"] = ""
    recipe |= {f"cleaning.{name}": value for name, value in config.data.cleaning.items()}
    return json.loads(json.dumps(recipe))  # the same types as in the manifest


def check_recipe(config, manifest: dict, folder: epath.PathLike) -> None:
    """Raises `UserError` if the records were prepared with another recipe; names the flags that match them."""
    recipe = recipe_of(config)
    if not recipe["corpus"]:  # the config does not set it
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


def changes_of_corpus(config, manifest: Mapping) -> list[str]:
    """Returns which sources are no longer what the records were prepared from, and how; one that is gone is not."""
    found = []
    for source, before in manifest.get("read", {}).items():
        try:
            now = corpus.extents(corpus.portions([source]))[source]
        except UserError:
            continue
        before = corpus.Extent(**before)
        if now.identity != before.identity:
            sizes = f"{now}, was {before}" if str(now) != str(before) else f"{now} as before, but written since"
            found.append(f"{source} has changed ({sizes})")
    return found


def prepare(config, output: epath.PathLike, workers: int = 1, beam_options: Sequence[str] | None = None) -> dict:
    """Writes the records of every stage of `config`, the tokenizer and the manifest to `output`; returns the manifest.

    Loads the tokenizer from `config.tokenizer.path`, or learns it from the training documents if the path is empty.
    Writes the manifest last. Goes on with what a killed run of the same config and corpus has finished. Raises
    `UserError` if `output` already has a manifest or the corpus has too few documents.

    Args:
      workers: processes on this machine.
      beam_options: if given, runs as Apache Beam pipelines with these options instead, such as `--runner=...`.
    """
    if workers < 1:
        raise UserError(f"--workers={workers}: must be at least 1")
    output = folder_for(output)
    began = time.time()
    selection = selection_of(config)
    groups = corpus.groups(list(selection.weights))
    phase(f"reading {_describe(groups)}")
    given = vocabulary.given_tokenizer(config)
    with lock.held(output, "--output"):
        folder_for(output)  # again: another preparation may just have ended
        if beam_options is None:
            prepared = prepare_here(config, output, groups, selection, given, workers)
        else:
            prepared = prepare_on_beam(config, output, groups, selection, given, beam_options)
        manifest = manifest_of(config, prepared, groups)
        shards.delete_others(output, manifest["sets"])
        write_manifest(output, manifest)
        epath.Path(prepared.job.work).parent.rmtree()
    report(manifest, time.time() - began)
    return manifest


def _describe(groups: Sequence[Group]) -> str:
    """Describes the corpus: "12 files, 3.0 MB", or names its sources if these are no files."""
    portions = [portion for group in groups for portion in group.portions]
    files, size = sum(len(portion.files) for portion in portions), sum(portion.bytes for portion in portions)
    others = [portion.source for portion in portions if not portion.files]
    parts = [*others, *([f"{files:,} file{'s' * (files > 1)}"] if files else [])]
    others = sum(count for portion in portions for _, count, _ in portion.others)
    skipped = f"; {others:,} other file{'s have names' if others > 1 else ' has a name'} that prepare does not read"
    return ", ".join(parts + ([describe_bytes(size)] if size else [])) + skipped * (others > 0)


def folder_for(output: epath.PathLike) -> epath.Path:
    """Raises `UserError` if records cannot be written there."""
    if not str(output):
        raise UserError("--output: name a folder")
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
    """What a preparation has done.

    Attributes:
      totals: statistics of the documents, by split.
      counts: the counts of `Selection.read`.
      written: the entry of each shard in the manifest.
    """

    job: Job
    totals: Mapping[str, int]
    counts: Mapping
    written: Mapping[shards.Shard, dict]


def prepare_here(
    config, output: epath.Path, groups: list[Group], selection: Selection, given: Tokenizer | None, workers: int
) -> Prepared:
    """Prepares the records in processes of this machine."""
    corpus_identity = identity_of_corpus(groups)
    work, ahead = unfinished(output, identity_of(config, given), corpus_identity), 2 * workers
    with worker_pool(workers) as pool:
        of_corpus = os.path.join(work, f"corpus-{corpus_identity}")  # what the whole text decides
        os.makedirs(of_corpus, exist_ok=True)
        selection = with_repeats(selection, groups, of_corpus, pool, ahead)
        used = given or learnt_tokenizer(config, groups, selection, of_corpus, pool, ahead)
        used.save(output)
        job = job_of(config, used, output, work)
        totals, counts, rows, paths = spill_all(job, groups, selection, pool, ahead)
        check_contents(config, totals, counts, rows)
        return Prepared(job, totals, counts, write_all(job, rows, paths, pool, ahead))


def prepare_on_beam(
    config, output: epath.Path, groups: list[Group], selection: Selection, given: Tokenizer | None, options
) -> Prepared:
    """Prepares the records with Apache Beam."""
    from bertjax.data.preprocessing import beam  # its import takes seconds

    work = output / UNFINISHED / "beam"
    if work.exists():
        work.rmtree()
    repeats = beam.find_repeats(selection, groups, work, options)
    used = given or beam.learn_tokenizer(config, groups, selection, repeats, work, options)
    used.save(output)
    job = job_of(config, used, output, str(work))
    totals, counts, written = beam.write_all(job, groups, selection, repeats, options)
    rows = collections.Counter()
    for shard, entry in written.items():
        rows[shard.part, shard.shape] += entry["records"]
    check_contents(config, totals, counts, rows)
    return Prepared(job, totals, counts, written)


def identity_of(config, given: Tokenizer | None) -> str:
    """A hash that changes if the records of the same text may become others."""
    version = STREAM_VERSION if config.data.stream else VERSION
    content = [version, recipe_of(config), config.data.layout, [list(shape) for shape in shapes(config)]]
    content += [given.fingerprint if given else [_learnt_by(config), config.model.vocab_size]]
    return _hash(json.dumps(content, sort_keys=True))


def _learnt_by(config) -> dict:
    """What says how a vocabulary is learnt, or extended."""
    found = config.tokenizer.to_dict()
    if not found.pop("extend"):
        return found
    base = tokenizer.load(found["kind"], found["path"], found["lowercase"])
    return found | {"extend": config.tokenizer.extend, "path": base.fingerprint}


def identity_of_corpus(groups: Sequence[Group]) -> str:
    """A hash that changes if the text may have changed."""
    return _hash("\n".join(group.identity for group in groups))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shapes(config) -> tuple[RecordShape, ...]:
    """Returns the shapes of the records of all stages of pre-training, one for each length."""
    most: dict[int, int] = {}
    for stage in stages_of(config):
        most[stage.length] = max(stage.max_predictions_per_seq, most.get(stage.length, 0))
    return tuple(RecordShape(*shape) for shape in most.items())


def unfinished(output: epath.Path, identity: str, corpus_identity: str) -> str:
    """Returns the local folder of what is kept between the passes: in the output, or in TMPDIR if that is remote.

    Blocks of a stopped run with the same identity are kept, and files of other runs are deleted. If the corpus has
    changed, blocks with the same text are kept.
    """
    if "://" not in str(output):
        folder = output / UNFINISHED
    else:
        folder = epath.Path(tempfile.gettempdir()) / f"bertjax-{_hash(str(output))}"
    work = folder / identity
    if work.exists():
        print(f"going on with the unfinished preparation in {output}", flush=True)
    elif folder.exists():
        folder.rmtree()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / f"corpus-{corpus_identity}").exists():
        blocks.keep_unmerged(str(work))
    return str(work)


def learnt_tokenizer(config, groups: list[Group], selection: Selection, work: str, pool, ahead: int) -> Tokenizer:
    """Learns the tokenizer and keeps it, or loads the one that a killed run has learnt."""
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    kept = epath.Path(work) / tokenizer.KINDS[kind].filename
    if kept.exists():
        return tokenizer.load(kind, kept, lowercase)
    learnt = vocabulary.learn_tokenizer(config, groups, selection, work, pool, ahead)
    learnt.save(work)
    return learnt


def job_of(config, used: Tokenizer, output: epath.Path, work: str) -> Job:
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


def spill_all(job: Job, groups: list[Group], selection: Selection, pool, ahead: int):
    """Spills the whole corpus.

    Returns its statistics by split, the counts of `Selection.read`, and of each part and shape the number of rows and
    the files that they are in, in the order of the corpus.
    """
    totals, counts, rows = collections.Counter(), collections.Counter(), collections.Counter()
    paths, done = collections.defaultdict(list), []
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
    job: Job,
    rows: Mapping[tuple[str, RecordShape], int],
    paths: Mapping[tuple[str, RecordShape], list[str]],
    pool,
    ahead: int,
) -> dict:
    """Writes all shards; returns what each contains. `rows`, `paths`: as `spill_all` returns them."""
    for shape in job.shapes:
        (epath.Path(job.output) / record_sets.set_folder(shape.length)).mkdir(exist_ok=True)
    phase("shuffling the sequences and writing the records")
    few = {each: merge_until_few(found, row_type(each[1], job), pool, ahead) for each, found in paths.items()}
    wanted = shards.shards_of(job, rows)
    function, parts = functools.partial(shards.write, job=job), ((s, few[s.part, s.shape]) for s in wanted)
    with Bar("writing the records", [len(wanted)], " files") as bar:
        written = {}
        for shard, contents in zip(wanted, in_order(pool, function, parts, ahead)):
            written[shard] = contents
            bar.update()
    return written


def manifest_of(config, prepared: Prepared, groups: Sequence[Group]) -> dict:
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
    """Returns the share of the tokens of training sequences that is no padding."""
    rows = sum(entry["records"] for shard, entry in written.items() if shard.shape == shape and is_train(shard.part))
    return round(totals[f"train_tokens_of_{shape.length}"] / (rows * shape.length), 4)


def report(manifest: dict, seconds: float) -> None:
    """Prints what was prepared, left out and mixed."""
    totals = manifest["corpus"]
    characters = totals["train_characters"] + totals["heldout_characters"]
    written = sum(file["records"] for found in manifest["sets"].values() for s in SPLITS for file in found[s].values())
    print(
        f"prepared {written:,} records from {totals['train_documents']:,} training and "
        f"{totals['heldout_documents']:,} held-out documents: {characters / 1e6:.1f} M characters in {seconds:.0f} s, "
        f"{characters / 1e6 / seconds:.2f} M/s",
        flush=True,
    )
    for line in summary.lines_of(manifest):
        print(line, flush=True)


def check_contents(config, totals: Mapping, counts: Mapping, rows: Mapping[tuple[str, RecordShape], int]) -> None:
    """Raises `UserError` if there is too little text to train or to evaluate on."""
    train, heldout = totals["train_documents"], totals["heldout_documents"]
    is_pairs = config.data.next_sentence == "pairs"
    needs = "next-sentence prediction needs at least two" if is_pairs else "at least one is needed"
    train_parts = {part for part, _ in rows if is_train(part)}
    if not all(any(rows[part, shape] for part in train_parts) for shape in shapes(config)):
        sources, left = ", ".join(corpus_sources(config)), cleaning.describe(counts) + summary.unused(totals, counts)
        ends = {"file": "a file is", "line": "a line is"}.get(config.data.document, "a blank line ends")
        one = ", and --config.data.next_sentence=none one" * is_pairs
        raise UserError(
            f"data.corpus: {sources} gives {train} document{'s' * (train != 1)} for training; {needs}{one} ({ends} a "
            f"document){left}"
        )
    heldout_parts = {part for part, _ in rows if not is_train(part)}
    all_held_out = all(any(rows[part, shape] for part in heldout_parts) for shape in shapes(config))
    if config.data.heldout_fraction and not all_held_out:
        needs += " of one source" * (len(heldout_parts) > 1)
        raise UserError(
            f"config.data.heldout_fraction = {config.data.heldout_fraction}: of {train + heldout} documents it holds "
            f"out {heldout}, but {needs}; increase it, or set it to 0"
        )

"""Converts a corpus to pre-masked TFRecords in several processes, with bounded memory.

The output does not depend on the number of processes, byte for byte.

First pass (`blocks`): workers tokenize blocks of documents, make pairs and mask them, with random generators of the
block's own, and spill the sequences to disk as arrays, sorted into random buckets. Second pass (`shards`): workers
gather the buckets of a shard from all blocks, shuffle them and write TFRecords. A worker never holds more than one
block or one shard.
"""

import tempfile
import time

from etils import epath

from bertjax.config import UserError, corpus_sources, stages_of
from bertjax.data import blocks, records, shards, vocabulary
from bertjax.data.job import SPLITS, Job, Stage, start_worker
from bertjax.data.workers import worker_pool

RECIPE_FIELDS = (
    "seed", "language", "split_sentences", "heldout_fraction", "dupe_factor", "masked_lm_prob", "short_seq_prob",
    "do_whole_word_mask", "text_column",
)  # fmt: skip


def recipe_of(config) -> dict:
    """Returns the config fields that determine the records, besides tokenizer and lengths."""
    return {"corpus": list(corpus_sources(config)), **{name: config.data[name] for name in RECIPE_FIELDS}}


def prepare(config, output: epath.PathLike, workers: int = 1) -> dict:
    """Writes the records of every stage of `config`, the tokenizer and the manifest to `output`; returns the manifest.

    Loads the tokenizer from `config.tokenizer.path`, or learns it from the training documents if the path is empty.
    Writes the manifest last; overwrites the output of an interrupted run. Raises `UserError` if `output` already has a
    manifest or the corpus has too few documents.
    """
    if workers < 1:
        raise UserError(f"--workers={workers}: must be at least 1")
    output = epath.Path(output)
    if (output / records.MANIFEST).exists():
        raise UserError(f"{output} already contains finished records; delete the folder, or choose another")
    began = time.time()
    tokenizer = vocabulary.tokenizer_of(config, workers)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(output)

    is_local = "://" not in str(output)
    for leftover in output.glob("spill-*") if is_local else ():  # from a killed run
        leftover.rmtree()
    with tempfile.TemporaryDirectory(prefix="spill-", dir=output if is_local else None) as spill:
        job = Job(
            stages=tuple(Stage(s.length, s.max_predictions_per_seq) for s in stages_of(config)),
            data=config.data.to_dict(),
            vocab_size=tokenizer.vocab_size,
            tokenizer=dict(kind=tokenizer.kind, path=str(output / tokenizer.filename), lowercase=tokenizer.lowercase),
            spill=spill,
            output=str(output),
        )
        with worker_pool(workers, start_worker, job) as pool:
            totals, spilled = blocks.spill_all(config, pool, 2 * workers)
            _check_documents(config, totals)
            sets = shards.write_all(job, spilled, pool, 2 * workers)

    manifest = {
        "recipe": recipe_of(config),
        "tokenizer": dict(
            kind=tokenizer.kind,
            lowercase=tokenizer.lowercase,
            vocab_size=tokenizer.vocab_size,
            fingerprint=tokenizer.fingerprint,
        ),
        "corpus": dict(sorted(totals.items())),
        "sets": sets,
    }
    records.write_manifest(output, manifest)
    seconds = time.time() - began
    characters = totals["train_characters"] + totals["heldout_characters"]
    written = sum(sum(files[split].values()) for files in sets.values() for split in SPLITS)
    print(
        f"prepared {written:,} records from {totals['train_documents']:,} training and "
        f"{totals['heldout_documents']:,} held-out documents: {characters / 1e6:.1f} M characters in {seconds:.0f} s, "
        f"{characters / 1e6 / seconds:.2f} M/s",
        flush=True,
    )
    return manifest


def _check_documents(config, totals: dict) -> None:
    train, heldout = totals["train_documents"], totals["heldout_documents"]
    if train < 2:
        raise UserError(
            f"data.corpus: {', '.join(corpus_sources(config))} gives {train} document{'s' * (train != 1)} for training;"
            f" next-sentence prediction needs at least two (a blank line ends a document)"
        )
    if config.data.heldout_fraction and heldout < 2:
        raise UserError(
            f"config.data.heldout_fraction = {config.data.heldout_fraction}: of {train + heldout} documents it holds "
            f"out {heldout}, but next-sentence prediction needs two; increase it, or set it to 0"
        )

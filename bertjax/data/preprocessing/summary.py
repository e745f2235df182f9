"""The summary of a preparation: numbers of files, documents and tokens, which the manifest contains.

Files: found = read + empty + skipped. Documents: read = training + held out + empty + left out + unused. Tokens: in the
corpus = in the records of a length + cut.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bertjax.data.corpus import cleaning, corpus, reading
from bertjax.data.corpus.corpus import Group
from bertjax.data.corpus.selection import SPLITS, skipped_files
from bertjax.data.preprocessing.blocks import UNKNOWN

STATISTICS = ("characters", "documents", "several_sentences", "sentences", "tokens")  # statistics of each split
MIN_REAL_TOKENS = 0.5  # a smaller share of tokens that are not padding gives a hint
MAX_CUT = 0.01  # a larger share of tokens outside of the records gives a warning
MAX_UNKNOWN = 0.01  # a larger share of unknown tokens in a source gives a warning
MAX_WORDS = 5  # unknown words that are shown
UNUSED = {  # counts of documents that are not used, without the counts of cleaning
    "empty_documents": "empty",
    "documents_without_tokens": "without any token",
    "unused_documents": "not drawn for the mixture",
}


def counts_of(
    totals: Mapping, counts: Mapping, groups: Sequence[Group], sources: Sequence[str], lengths: Sequence[int]
) -> dict:
    """Returns the counts of a preparation for the manifest: "corpus", "sources", "files", "cleaning", "unknown_words".

    Args:
      totals: the statistics of the blocks, by split.
      counts: the counts of `Selection.read`.
      groups: the corpus.
      sources: the sources of the corpus.
      lengths: the sequence lengths of the records.
    """
    portions = [portion for group in groups for portion in group.portions]
    skipped, unread = skipped_files(counts), corpus.unread_kinds(portions)
    names = *STATISTICS, *(f"tokens_in_records_of_{length}" for length in lengths)
    whole = {f"{split}_{name}": totals[f"{split}_{name}"] for split in SPLITS for name in names}
    of_all = {name: sum(counts[name, source] for source in sources) for name in ("read", "empty_documents")}
    whole["read_documents"] = of_all["read"] + of_all["empty_documents"] + counts["unreadable_documents"]
    whole["empty_documents"] = of_all["empty_documents"]
    whole["documents_without_tokens"] = sum(totals[f"{split}_documents_without_tokens"] for split in SPLITS)
    whole["unused_documents"] = counts["unused_documents"]
    paths = (path for portion in portions for path in portion.files)
    whole["text_files"] = sum(map(reading.is_plain_text, paths))
    words: collections.Counter[tuple[str, str]] = collections.Counter()
    for name, count in totals.items():
        if UNKNOWN in name:
            number, _, word = name.partition(UNKNOWN)[2].partition(" ")
            words[sources[int(number)], word] += count
    return {
        "corpus": whole,
        "sources": {
            source: {
                **{name: counts[name, source] for name in ("documents", "characters")},
                **{
                    name: sum(totals[f"{split}_{name}_of_source_{number}"] for split in SPLITS)
                    for name in ("tokens", "unknown_tokens")
                },
            }
            for number, source in enumerate(sources)
        },
        "files": {
            source: {
                "read": counts["files", source],
                "empty": counts["empty_files", source],
                "no_json_lines": counts["skipped_files", source],
                "first_faults": [f"{path}: {fault}" for path, fault in skipped.get(source, ())],
                "other_names": {kind: [n, *first] for kind, (n, first) in unread.get(source, {}).items()},
            }
            for source in sources
            if counts["files", source] + counts["empty_files", source] + counts["skipped_files", source]
        },
        "cleaning": {change: counts[change] for change in cleaning.CHANGES if counts[change]},
        "unknown_words": _first_words(words),
    }


def _first_words(words: Mapping[tuple[str, str], int]) -> dict[str, list[str]]:
    """Returns the most frequent words of each source from the counts of (source, word)."""
    frequent: dict[str, list[str]] = {}
    for source, word in sorted(words, key=lambda key: (-words[key], key)):
        if len(first := frequent.setdefault(source, [])) < MAX_WORDS:
            first.append(word)
    return frequent


def unused(totals: Mapping, counts: Mapping) -> str:
    """Returns the counts of documents that are not training documents, to append to a message; see `counts_of`."""
    unused_counts = {
        "held out (config.data.heldout_fraction)": totals["heldout_documents"],
        "empty": sum(count for name, count in counts.items() if "empty_documents" in name),
        "without any token": sum(totals[f"{split}_documents_without_tokens"] for split in SPLITS),
        "not drawn for the mixture": counts["unused_documents"],
    }
    return "".join(f"; {count:,} {text}" for text, count in unused_counts.items() if count)


def summary_lines(manifest: Mapping) -> Iterator[str]:
    """Yields the lines of the summary of a manifest of this version."""
    yield from _files(manifest)
    yield from _documents(manifest)
    yield from _tokens(manifest)
    yield from _mixture(manifest)
    yield from _hints(manifest)
    yield from warnings_of(manifest)


def _files(manifest: Mapping) -> Iterator[str]:
    files = manifest["files"]
    for source, counts in files.items():
        kinds = {kind: (count, names) for kind, (count, *names) in counts["other_names"].items()}
        skipped = counts["no_json_lines"] + sum(count for count, _ in kinds.values())
        total = counts["read"] + counts["empty"] + skipped
        of_source = f" of {source}" if len(files) > 1 else ""
        empty = f", {counts['empty']:,} without a document" if counts["empty"] else ""
        yield f"files{of_source}: {total:,} found = {counts['read']:,} read{empty}, {skipped:,} skipped"
        if counts["no_json_lines"]:
            yield f"  {counts['no_json_lines']:,} skipped for their content, such as {counts['first_faults'][0]}"
        if kinds:
            yield f"  skipped for their names: {reading.describe_kinds(kinds)}"


def _documents(manifest: Mapping) -> Iterator[str]:
    totals, removed = manifest["corpus"], manifest["cleaning"]
    parts = [f"{totals['train_documents']:,} for training", f"{totals['heldout_documents']:,} held out"]
    parts += [f"{totals[name]:,} {text}" for name, text in UNUSED.items() if totals[name]]
    if left_out := sum(count for change, count in removed.items() if change not in cleaning.LINE_CHANGES):
        parts.append(f"{left_out:,} left out")
    yield f"documents: {totals['read_documents']:,} read = {', '.join(parts)}"
    for change, count in removed.items():
        yield f"  {count:,} {cleaning.CHANGES[change]}"


def _tokens(manifest: Mapping) -> Iterator[str]:
    totals = manifest["corpus"]
    tokens, unknown = sum(totals[f"{split}_tokens"] for split in SPLITS), _unknown_share(manifest["sources"].values())
    yield f"tokens: {tokens:,} in the documents for training and held out, {unknown:.2%} of them unknown"
    for length, share in manifest["real_tokens_share"].items():
        cut = tokens - (kept := _kept(totals, length))
        counts = f"{tokens:,} tokens = {kept:,} in records, {cut:,}{f' ({cut / tokens:.2%})' if cut else ''} cut"
        yield f"sequences of {length} tokens are on average {share:.0%} full: {counts}"


def _kept(totals: Mapping, length: str) -> int:
    """Returns the number of tokens of the corpus in the records of a length."""
    return sum(totals[f"{split}_tokens_in_records_of_{length}"] for split in SPLITS)


def _unknown_share(sources: Iterable[Mapping]) -> float:
    """Returns the share of unknown tokens in the sources."""
    sources = [*sources]
    return sum(source["unknown_tokens"] for source in sources) / max(1, sum(source["tokens"] for source in sources))


def _mixture(manifest: Mapping) -> Iterator[str]:
    sources = manifest["sources"]
    used = sum(source["characters"] for source in sources.values())
    for name, source in sources.items() if len(sources) > 1 else ():
        share, unknown = source["characters"] / max(1, used), f"{_unknown_share([source]):.2%} unknown tokens"
        yield f"{share:.1%} of the text is from {name}: {source['documents']:,} documents, copies counted, {unknown}"
    for source in [name for name in sources if not _has_heldout(manifest, name)]:
        yield f"{source} has too little held-out text for a sequence: no scores of {source} are measured"


def _has_heldout(manifest: Mapping, source: str) -> bool:
    """Returns whether a source has held-out sequences; True if no sequences are held out by source."""
    entries = [entry for files in manifest["sets"].values() for entry in files["heldout"].values()]
    return not any("source" in entry for entry in entries) or source in [entry["source"] for entry in entries]


def warnings_of(manifest: Mapping) -> Iterator[str]:
    """Yields warnings about cut or unknown text, with the settings that avoid it."""
    totals, recipe = manifest.get("corpus", {}), manifest["recipe"]
    if "read_documents" not in totals:  # manifests of older versions do not contain it
        return
    tokens = sum(totals[f"{split}_tokens"] for split in SPLITS)
    for length in manifest["sets"]:
        if tokens - (kept := _kept(totals, length)) > MAX_CUT * tokens:
            yield f"warning: {1 - kept / tokens:.1%} of the tokens are in no record of length {length}: {_why(recipe)}"
    for name, source in manifest["sources"].items():
        if (unknown := _unknown_share([source])) > MAX_UNKNOWN:
            words = ", ".join(map(repr, manifest["unknown_words"].get(name, ())))
            yield (
                f"warning: {unknown:.1%} of the tokens of {name} are unknown to the vocabulary"
                f"{f', such as {words}' if words else ''}; leave tokenizer.path empty to learn a "
                f"vocabulary of this text (--config.tokenizer.kind=bpe has no unknown letters), or set "
                f"--config.tokenizer.extend=1000 with init_checkpoint"
            )


def _hints(manifest: Mapping) -> Iterator[str]:
    """Yields hints about sequences with much padding, and about pairs without a real next sentence."""
    totals, recipe = manifest["corpus"], manifest["recipe"]
    is_divided = recipe["document"] != "file" and totals["text_files"] > 1
    whole = ["--config.data.document=file if the paragraphs of a file are one text"] * is_divided
    is_pair = recipe["next_sentence"] != "none"
    one_segment = ["--config.data.next_sentence=none (sequences run across documents)"] * is_pair
    for length, share in manifest["real_tokens_share"].items():
        if share < MIN_REAL_TOKENS:
            per_document = totals["train_tokens"] / max(1, totals["train_documents"])
            yield (
                f"most of a sequence of {length} is padding, because a document has {per_document:.0f} tokens on "
                f"average; set {', or '.join([*one_segment, '--config.packing=True', *whole])}"
            )
    if recipe["next_sentence"] == "pairs" and not totals["train_several_sentences"]:
        settings = ", or ".join(one_segment + whole)
        yield f"no document has two sentences, so that no pair has a real next sentence; set {settings}"


def _why(recipe: Mapping) -> str:
    if recipe.get("stream"):
        return "the last tokens of a block that do not fill a sequence are cut; use shorter sequences for little text"
    copies = recipe["dupe_factor"]
    return (
        f"sentences are cut where a pair would exceed the length (data.next_sentence={recipe['next_sentence']}, as in "
        f"the paper's code); --config.data.next_sentence=none keeps all text, and a data.dupe_factor above {copies} "
        f"keeps more of it, because each copy is cut differently"
    )

"""The tokenizer of a corpus: loaded, or learnt from the words of the documents that are not held out."""

import collections
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.progress import Bar, phase
from bertjax.common.workers import in_order, worker_pool
from bertjax.data.corpus import cleaning, corpus, sentences
from bertjax.data.corpus.corpus import Group
from bertjax.data.corpus.selection import Selection, is_train, selection_of, with_repeats
from bertjax.data.preprocessing.blocks import Block, read_blocks
from bertjax.data.preprocessing.word_counts import Sample, WordCounts, sample
from bertjax.models import families
from bertjax.models.family import NamesSpecialPieces
from bertjax.text import tokenizer, vocabulary_extension, vocabulary_learning
from bertjax.text.tokenizer import Tokenizer


def given_tokenizer(config) -> Tokenizer | None:
    """Loads the tokenizer of `config.tokenizer.path`; None if pieces are to be learnt. Bytes have no need of one.

    Raises `UserError` unless its size is the model's, and it has a [MASK] if the model needs one.
    """
    kind, path, lowercase = (config.tokenizer[name] for name in ("kind", "path", "lowercase"))
    if not path and kind != tokenizer.Bytes.kind:
        _check_learnt(config)
        return None
    loaded = tokenizer.load(kind, path, lowercase) if path else tokenizer.Bytes()
    check_vocab_size(config, loaded, path or "of bytes", config.tokenizer.extend)
    offset = config.model.get("position_offset", loaded.pad_id + 1)
    if offset != loaded.pad_id + 1:  # transformers could not read the model
        raise UserError(
            f"config.model.position_offset = {offset}: positions are counted from the id of padding on, which is "
            f"{loaded.pad_id} in {path or 'bytes'}; set it to {loaded.pad_id + 1}"
        )
    if loaded.mask_id == loaded.sep_id and families.lm_type_of(config) == "masked":
        raise UserError(f"config.tokenizer.path = {path!r}: has no [MASK]; set --config.model.causal=True, or another")
    return None if config.tokenizer.extend else loaded


def _check_learnt(config) -> None:
    """Raises `UserError` if a kind of tokenizer is not learnt. Any but bytes can be extended."""
    if config.tokenizer.extend and config.tokenizer.path:
        return
    if config.tokenizer.kind == tokenizer.Bytes.kind:
        raise UserError("config.tokenizer.kind = 'bytes': there is nothing to learn; leave tokenizer.path empty")
    if config.tokenizer.kind == tokenizer.Unigram.kind:
        remedy = "name a tokenizer.json in tokenizer.path, or learn one with tokenizer.kind=sentencepiece"
        raise UserError(f"config.tokenizer.kind = 'unigram': is read, not learnt; {remedy}")


def check_vocab_size(config, loaded: tokenizer.Tokenizer, path: epath.PathLike, more: int = 0) -> None:
    """Raises `UserError` unless model and tokenizer, with so many more pieces, have the same size. Published models may
    have unused rows."""
    pieces = loaded.vocab_size + more
    spare = config.model.vocab_size - pieces
    if spare < 0 or (spare > 0 and not config.init_checkpoint):
        raise UserError(
            f"config.model.vocab_size = {config.model.vocab_size}: the tokenizer {path} has {pieces} pieces;"
            f" set --config.model.vocab_size={pieces}"
        )


def learn_vocabulary(config, workers: int) -> Tokenizer:
    """Learns or extends the tokenizer of a config in `workers` processes. Raises `UserError` if there is nothing to
    learn."""
    _check_learnt(config)
    selection = selection_of(config)
    groups = corpus.groups(list(selection.weights))
    with worker_pool(workers) as pool, tempfile.TemporaryDirectory() as work:
        selection = with_repeats(selection, groups, work, pool, 2 * workers)
        return learn_tokenizer(config, groups, selection, work, pool, 2 * workers)


def learn_tokenizer(config, groups: list[Group], selection: Selection, work: str, pool, ahead: int) -> Tokenizer:
    """Learns a vocabulary of `model.vocab_size` pieces from the documents that are not held out.

    Reads them once, each document once whatever the mixture. The vocabulary does not depend on the number of processes,
    and the memory not on the corpus.
    """
    if more := config.tokenizer.extend:
        phase(f"extending the vocabulary by {more:,} tokens")
    else:
        phase(f"learning a vocabulary of {config.model.vocab_size:,} tokens")
    return learn_from(config, count_corpus(words_of(config), groups, selection, work, pool, ahead))


def learn_from(config, counts: Sample) -> Tokenizer:
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    is_new = not config.tokenizer.extend
    if is_new and kind == "wordpiece" and lowercase and config.data.language != "en":
        print("text is lower-cased and accents are stripped; --config.tokenizer.lowercase=False keeps both", flush=True)
    rare = f"; of words rarer than {counts.threshold}, a sample" if counts.threshold > 1 else ""
    print(f"counted {counts.total:,} words, {len(counts.words):,} different{rare}", flush=True)
    if config.tokenizer.extend:
        base = tokenizer.load(kind, config.tokenizer.path, lowercase)
        return vocabulary_extension.extended(base, counts.words, config.tokenizer.extend)
    family = families.FAMILIES.get(config.model.family)
    special = family.special_pieces if isinstance(family, NamesSpecialPieces) else tokenizer.SPECIAL_PIECES
    return vocabulary_learning.learn(kind, counts.words, config.model.vocab_size, lowercase, special)


class Words(NamedTuple):
    """How to count words."""

    kind: str  # kind of tokenizer
    lowercase: bool
    language: str
    split_sentences: bool


def words_of(config) -> Words:
    return Words(config.tokenizer.kind, config.tokenizer.lowercase, config.data.language, config.data.split_sentences)


def count_block(block: Block, how: Words) -> collections.Counter[str]:
    texts = (sentences.split(each.document, how.language, how.split_sentences) for each in block.selected)
    return vocabulary_learning.count_words(how.kind, itertools.chain.from_iterable(texts), how.lowercase)


def count_corpus(how: Words, groups: Iterable[Group], selection: Selection, work: str, pool, ahead: int) -> Sample:
    """Counts the words of the documents that are not held out, in a folder within `work`."""
    most, read = vocabulary_learning.COUNTED_LETTERS[how.kind], collections.Counter()
    train = (block for block in read_blocks(groups, selection, read) if is_train(block.part))
    with tempfile.TemporaryDirectory(dir=work) as folder:
        counts = WordCounts(pathlib.Path(folder), most)
        with Bar("counting words", [group.bytes for group in groups]) as bar:
            for words in in_order(pool, functools.partial(count_block, how=how), train, ahead):
                counts.add(words)
                bar.update(read["bytes"] - bar.n)
        found = sample(counts.parts(), most)
    if not found.words:
        raise UserError(f"data.corpus: there are no words to learn a vocabulary from{cleaning.describe(read)}")
    return found

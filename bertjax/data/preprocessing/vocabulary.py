"""Loads the tokenizer of a corpus, or learns it from the words of the training documents."""

import collections
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.progress import Bar, phase
from bertjax.common.workers import in_order, worker_pool
from bertjax.data.corpus import cleaning, corpus, sentences
from bertjax.data.corpus.corpus import Group
from bertjax.data.corpus.selection import Selection, is_train, selection_of, with_repeats
from bertjax.data.preprocessing.blocks import Block, read_blocks
from bertjax.data.preprocessing.word_counts import Sample, WordCounts, sample_words
from bertjax.models import families
from bertjax.models.family import NamesSpecialTokens
from bertjax.text import tokenizer, vocabulary_extension, vocabulary_learning
from bertjax.text.tokenizer import Tokenizer


def tokenizer_of_config(config: ConfigDict) -> Tokenizer | None:
    """Loads the tokenizer of `config.tokenizer.path`, or the tokenizer of bytes; None if tokens must be learnt.

    Raises:
      UserError: the model has another vocabulary size, or needs a [MASK] that the tokenizer does not have.
    """
    kind, path, lowercase = (config.tokenizer[name] for name in ("kind", "path", "lowercase"))
    if not path and kind != tokenizer.Bytes.kind:
        _check_learnable(config)
        return None
    loaded = tokenizer.load_tokenizer(kind, path, lowercase) if path else tokenizer.Bytes()
    check_vocab_size(config, loaded, path or "of bytes", config.tokenizer.extend)
    offset = config.model.get("position_offset", loaded.pad_id + 1)
    if offset != loaded.pad_id + 1:  # transformers could not read the model
        raise UserError(
            f"config.model.position_offset = {offset}: must be {loaded.pad_id + 1}, because positions start after the "
            f"id of the padding token of {path or 'bytes'}, {loaded.pad_id}"
        )
    if loaded.mask_id == loaded.sep_id and families.lm_type_of(config) == "masked":
        raise UserError(
            f"config.tokenizer.path = {path!r}: has no [MASK]; set --config.model.causal=True, or another path"
        )
    return None if config.tokenizer.extend else loaded


def _check_learnable(config: ConfigDict) -> None:
    """Raises `UserError` if the tokenizer can neither be learnt nor extended."""
    if config.tokenizer.extend and config.tokenizer.path:
        return
    if config.tokenizer.kind == tokenizer.Bytes.kind:
        raise UserError("config.tokenizer.kind = 'bytes': the vocabulary of bytes is fixed; leave tokenizer.path empty")
    if config.tokenizer.kind in (tokenizer.Unigram.kind, tokenizer.ByteFallback.kind):
        remedy = "set tokenizer.path to a tokenizer.json, or set tokenizer.kind=sentencepiece"
        raise UserError(f"config.tokenizer.kind = {config.tokenizer.kind!r}: bertjax cannot learn this kind; {remedy}")


def check_vocab_size(config: ConfigDict, loaded: tokenizer.Tokenizer, path: epath.PathLike, more: int = 0) -> None:
    """Raises `UserError` unless the vocabulary sizes of model and tokenizer are equal.

    With `init_checkpoint`, the model may have more rows, because published models have unused rows.

    Args:
      config: the whole config.
      loaded: the tokenizer.
      path: the path of the tokenizer, for the message.
      more: the number of new tokens, `config.tokenizer.extend`.
    """
    size = loaded.vocab_size + more
    spare = config.model.vocab_size - size
    if spare < 0 or (spare > 0 and not config.init_checkpoint):
        raise UserError(
            f"config.model.vocab_size = {config.model.vocab_size}: the tokenizer {path} has {size} tokens;"
            f" set --config.model.vocab_size={size}"
        )


def learn_vocabulary(config: ConfigDict, workers: int) -> Tokenizer:
    """Learns or extends the tokenizer of a config in `workers` processes. Raises `UserError` for a fixed vocabulary."""
    _check_learnable(config)
    selection = selection_of(config)
    groups = corpus.groups(list(selection.weights))
    with worker_pool(workers) as pool, tempfile.TemporaryDirectory() as work:
        selection = with_repeats(selection, groups, work, pool, 2 * workers)
        return learn_tokenizer(config, groups, selection, work, pool, 2 * workers)


def learn_tokenizer(
    config: ConfigDict, groups: list[Group], selection: Selection, work: str, pool: Any, ahead: int
) -> Tokenizer:
    """Learns a vocabulary of `model.vocab_size` tokens from the training documents, or extends a vocabulary.

    Counts each document once for any mixture. The vocabulary does not depend on the number of processes. The memory use
    does not depend on the size of the corpus.

    Args:
      config: the whole config.
      groups: the corpus.
      selection: the selection of documents.
      work: a folder for temporary files.
      pool: the pool of workers.
      ahead: the number of tasks that the workers start before their results are needed.
    """
    if more := config.tokenizer.extend:
        phase(f"extending the vocabulary by {more:,} tokens")
    else:
        phase(f"learning a vocabulary of {config.model.vocab_size:,} tokens")
    return learn_from(config, count_corpus(config, groups, selection, work, pool, ahead))


def learn_from(config: ConfigDict, counts: Sample) -> Tokenizer:
    """Learns or extends a vocabulary from counts of words."""
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    is_new = not config.tokenizer.extend
    if is_new and kind == "wordpiece" and lowercase and config.data.language != "en":
        print("text is lower-cased and accents are stripped; --config.tokenizer.lowercase=False keeps both", flush=True)
    rare = f"; a sample of words rarer than {counts.threshold}" if counts.threshold > 1 else ""
    print(f"counted {counts.total:,} words, {len(counts.words):,} different{rare}", flush=True)
    if config.tokenizer.extend:
        base = tokenizer.load_tokenizer(kind, config.tokenizer.path, lowercase)
        return vocabulary_extension.extended(base, counts.words, config.tokenizer.extend)
    family = families.FAMILIES.get(config.model.family)
    special = family.special_tokens if isinstance(family, NamesSpecialTokens) else tokenizer.SPECIAL_TOKENS
    return vocabulary_learning.learn_new_vocabulary(kind, counts.words, config.model.vocab_size, lowercase, special)


def count_block(block: Block, config: ConfigDict) -> collections.Counter[str]:
    """Counts the words of a block."""
    language, split_sentences = config.data.language, config.data.split_sentences
    texts = (sentences.split(selected.document, language, split_sentences) for selected in block.selected)
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    return vocabulary_learning.count_words(kind, itertools.chain.from_iterable(texts), lowercase)


def count_corpus(
    config: ConfigDict, groups: Iterable[Group], selection: Selection, work: str, pool: Any, ahead: int
) -> Sample:
    """Counts the words of the training documents; see `learn_tokenizer` for the arguments."""
    most = vocabulary_learning.COUNTED_LETTERS[config.tokenizer.kind]
    read: collections.Counter = collections.Counter()
    train = (block for block in read_blocks(groups, selection, read) if is_train(block.part))
    with tempfile.TemporaryDirectory(dir=work) as folder:
        counts = WordCounts(pathlib.Path(folder), most)
        with Bar("counting words", [group.bytes for group in groups]) as bar:
            for counted in in_order(pool, functools.partial(count_block, config=config), train, ahead):
                counts.add(counted)
                bar.update(read["bytes"] - bar.n)
        words = sample_words(counts.parts(), most)
    if not words.words:
        raise UserError(
            f"data.corpus: there are no words to learn a vocabulary from; add text{cleaning.describe_changes(read)}"
        )
    return words

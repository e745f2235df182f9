"""The tokenizer of a corpus: loaded, or learnt from the documents that are not held out."""

import collections
from collections.abc import Iterator

from etils import epath

from bertjax.config import UserError
from bertjax.text import sentences, tokenizer


def load_tokenizer(config) -> tokenizer.Tokenizer:
    """Loads the tokenizer of `config.tokenizer.path`. Its size must match the model's."""
    loaded = tokenizer.load(config.tokenizer.kind, config.tokenizer.path, config.tokenizer.lowercase)
    check_vocab_size(config, loaded, config.tokenizer.path)
    return loaded


def check_vocab_size(config, loaded: tokenizer.Tokenizer, path: epath.PathLike) -> None:
    """Raises `UserError` unless model and tokenizer have the same size. Published models may have unused rows."""
    spare = config.model.vocab_size - loaded.vocab_size
    if spare < 0 or (spare > 0 and not config.init_checkpoint):
        raise UserError(
            f"config.model.vocab_size = {config.model.vocab_size}: the tokenizer {path} has {loaded.vocab_size} pieces;"
            f" set --config.model.vocab_size={loaded.vocab_size}"
        )


def learn_tokenizer(config, groups, selection, pool, ahead) -> tokenizer.Tokenizer:  # STUB
    """Learns a vocabulary of `model.vocab_size` pieces from the documents that are not held out."""

    def texts() -> Iterator[str]:
        for group in groups:
            for each in selection.read(group, collections.Counter()):
                if each.split == "train":
                    yield from sentences.split(each.document, config.data.language, config.data.split_sentences)

    if config.tokenizer.kind == "wordpiece" and config.tokenizer.lowercase and config.data.language != "en":
        print("text is lower-cased and accents are stripped; --config.tokenizer.lowercase=False keeps both", flush=True)
    return tokenizer.learn(config.tokenizer.kind, texts, config.model.vocab_size, config.tokenizer.lowercase)

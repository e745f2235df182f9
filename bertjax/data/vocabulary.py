"""The tokenizer of a corpus: loaded, or learnt from the documents that are not held out."""

from collections.abc import Iterator

from etils import epath

from bertjax.config import UserError, corpus_sources
from bertjax.data import corpus
from bertjax.text import sentences, tokenizer


def tokenizer_of(config) -> tokenizer.Tokenizer:
    """Loads the tokenizer of a config, or learns it if the config gives no path. Its size must match the model's."""
    if not config.tokenizer.path:
        return learn_tokenizer(config)
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


def learn_tokenizer(config) -> tokenizer.Tokenizer:
    """Learns a vocabulary of `model.vocab_size` pieces from the documents that are not held out."""

    def texts() -> Iterator[str]:
        for document in corpus.read_documents(corpus_sources(config), config.data.text_column):
            if not corpus.is_heldout(document, config.data.heldout_fraction, config.data.seed):
                yield from sentences.split(document, config.data.language, config.data.split_sentences)

    if config.tokenizer.kind == "wordpiece" and config.tokenizer.lowercase and config.data.language != "en":
        print("text is lower-cased and accents are stripped; --config.tokenizer.lowercase=False keeps both", flush=True)
    return tokenizer.learn(config.tokenizer.kind, texts, config.model.vocab_size, config.tokenizer.lowercase)

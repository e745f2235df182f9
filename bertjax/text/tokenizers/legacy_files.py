"""Converts the tokenizer files of folders without a tokenizer.json to the content of a tokenizer.json."""

import re
from typing import Any

import tokenizers
from etils import epath
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from bertjax.common.errors import UserError
from bertjax.common.files import parse_json, read_json
from bertjax.text.tokenizers.from_json import END_OF_TEXT, FAIRSEQ
from bertjax.text.tokenizers.interface import SPECIAL_TOKENS, XLNET, read_tokenizer_file
from bertjax.text.tokenizers.json_file import set_template
from bertjax.text.tokenizers.sentencepiece import read_unigrams

# The tokens that fairseq puts before the tokens of a SentencePiece model, and the number of tokens of the model that it
# omits. XLM-R omits <unk>, <s> and </s>. CamemBERT omits <unk>, so that its vocabulary contains <s> and </s> twice.
XLM_R = ("<s>", "<pad>", "</s>", "<unk>"), 3
CAMEMBERT = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"), 1
DEBERTA_MODEL = "spm.model"
SPIECE_MODEL = "spiece.model"  # of XLNet or ALBERT
ALBERT = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")  # the special tokens of ALBERT


def bpe_json(path: epath.Path) -> bytes:
    """Converts a vocab.json with its merges.txt, of RoBERTa or GPT-2, to a tokenizer.json.

    Raises `UserError` unless the files are a byte-level BPE with special tokens.
    """
    content, merges = read_tokenizer_file(path), read_tokenizer_file(path.parent / "merges.txt")
    try:
        vocabulary = parse_json(content, dict[str, int])
        lines = [line.rstrip("\r") for line in merges.decode().split("\n")]
        pairs: list[Any] = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        if wrong := [" ".join(pair) for pair in pairs if len(pair) != 2]:
            raise ValueError(f"merges.txt has the line {wrong[0]!r}, which is not a pair of tokens")
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    except Exception as error:  # the library raises the base class
        raise UserError(f"tokenizer.path: {path} and its merges.txt are no byte-level BPE ({error})") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if END_OF_TEXT in vocabulary and FAIRSEQ[0] not in vocabulary:  # RoBERTa contains all tokens of GPT-2
        tokenizer.add_special_tokens([END_OF_TEXT])
    else:
        _add_fairseq_pieces(tokenizer, path)
    return tokenizer.to_str().encode()


def unigram_json(path: epath.Path) -> bytes:
    """Converts the SentencePiece model of XLNet, ALBERT, DeBERTa-v2, CamemBERT or XLM-R to a tokenizer.json.

    The model of XLNet and of ALBERT is spiece.model, whose special tokens distinguish the two. The model of DeBERTa-v2
    is spm.model, the model of the other two is sentencepiece.bpe.model. The files beside the model distinguish
    CamemBERT from XLM-R.

    Raises `UserError` unless the file is a SentencePiece model of type unigram with special tokens.
    """
    scored, charsmap = read_unigrams(path)
    if path.name == SPIECE_MODEL:
        return _spiece_json(path, scored, charsmap)
    if path.name == DEBERTA_MODEL:
        return _deberta_json(path, scored)
    first, omitted = CAMEMBERT if _is_camembert(path.parent) else XLM_R
    tokens = [*((token, 0.0) for token in first), *scored[omitted:], ("<mask>", 0.0)]
    tokenizer = _unigram_of_words(tokens, first.index("<unk>"))
    tokenizer.normalizer = normalizers.Precompiled(charsmap)
    tokenizer.add_special_tokens([token for token in first if token not in FAIRSEQ])
    _add_fairseq_pieces(tokenizer, path)
    return tokenizer.to_str().encode()


def _spiece_json(path: epath.Path, scored: list[tuple[str, float]], charsmap: bytes) -> bytes:
    """Converts the tokens of XLNet or ALBERT to a tokenizer.json, as transformers does.

    The normalizer replaces quotation marks, and strips accents and folds case as tokenizer_config.json states. The
    code of both models splits a token such as "7,"; transformers makes these tokens unlikely instead, by -100.
    """
    names = [token for token, _ in scored]
    is_albert = ALBERT[2] in names
    special, model = (ALBERT, "ALBERT") if is_albert else (XLNET, "XLNet")
    if missing := [token for token in special if token not in names]:
        raise UserError(
            f"tokenizer.path: {path} lacks {', '.join(missing)}, which {model} needs; supported: the {path.name} of "
            f"{model}"
        )
    scored = [(token, score - 100 * bool(re.search(r"\d,$", token))) for token, score in scored]
    tokenizer, settings = _unigram_of_words(scored, names.index("<unk>")), _settings_beside(path)
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [] if settings.get("keep_accents") else [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase()] if settings.get("do_lower_case", is_albert) else []
    steps += [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])
    more = [token for token in ("<s>", "</s>", "<eop>", "<eod>") if token in names and not is_albert]
    tokenizer.add_special_tokens([AddedToken(token, lstrip=token == special[-1]) for token in (*more, *special)])
    if is_albert:
        set_template(tokenizer, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ("[CLS]", "[SEP]"))
    else:
        single, pair = "$A:0 <sep>:0 <cls>:2", "$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2"
        set_template(tokenizer, single, pair, ("<sep>", "<cls>"))
    return tokenizer.to_str().encode()


def _deberta_json(path: epath.Path, scored: list[tuple[str, float]]) -> bytes:
    """Converts the tokens of DeBERTa-v2 to a tokenizer.json, as the DebertaV2Tokenizer of transformers 5 does.

    The model lacks [MASK], which is added after its tokens. transformers 5 normalizes text to NFC, and ignores the
    normalization of the model.
    """
    names, (*without_mask, mask) = [token for token, _ in scored], SPECIAL_TOKENS
    if missing := [token for token in without_mask if token not in names]:
        raise UserError(f"tokenizer.path: {path} lacks {', '.join(missing)}, which DeBERTa-v2 needs")
    tokenizer = tokenizers.Tokenizer(models.Unigram(scored, unk_id=names.index("[UNK]"), byte_fallback=False))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC()]
    steps = [normalizers.Lowercase(), *steps] if _settings_beside(path).get("do_lower_case") else steps
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Strip(left=False, right=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([*without_mask, mask])
    set_template(tokenizer, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ("[CLS]", "[SEP]"))
    return tokenizer.to_str().encode()


def _unigram_of_words(tokens: list[tuple[str, float]], unk_id: int) -> tokenizers.Tokenizer:
    """Returns a unigram tokenizer of the tokenizers library that splits text at spaces first."""
    tokenizer = tokenizers.Tokenizer(models.Unigram(tokens, unk_id=unk_id, byte_fallback=False))
    words = pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(words))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def _settings_beside(path: epath.Path) -> dict[str, Any]:
    """Returns the content of the tokenizer_config.json beside a file; {} without the file."""
    settings = path.parent / "tokenizer_config.json"
    return read_json(settings) if settings.exists() else {}


def _is_camembert(folder: epath.Path) -> bool:
    """Returns whether config.json or tokenizer_config.json names CamemBERT."""
    stated = (("config.json", "model_type"), ("tokenizer_config.json", "tokenizer_class"))
    return any(
        str(read_json(folder / name).get(field)).lower().startswith("camembert")
        for name, field in stated
        if (folder / name).exists()
    )


def _add_fairseq_pieces(tokenizer: tokenizers.Tokenizer, path: epath.Path) -> None:
    """Adds the special tokens and the template of fairseq. Raises `UserError` if the vocabulary lacks a token."""
    if missing := [token for token in FAIRSEQ if tokenizer.token_to_id(token) is None]:
        raise UserError(f"tokenizer.path: {path} lacks {', '.join(missing)}, which RoBERTa needs")
    tokenizer.add_special_tokens([AddedToken(token, lstrip=token == "<mask>", normalized=False) for token in FAIRSEQ])
    set_template(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>", ("<s>", "</s>"))

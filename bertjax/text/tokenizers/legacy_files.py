"""The files of a tokenizer in folders that have no tokenizer.json, as the content of one."""

import re

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import parse_json, read_json
from bertjax.text.tokenizers.from_json import END_OF_TEXT, FAIRSEQ
from bertjax.text.tokenizers.interface import XLNET, read_file
from bertjax.text.tokenizers.sentencepiece import read_unigrams

# The pieces that fairseq has before those of a SentencePiece model, and how many of these it leaves out: <unk>, <s>
# and </s>, or <unk> alone, so that CamemBERT has the others twice.
XLM_R = ("<s>", "<pad>", "</s>", "<unk>"), 3
XLNET_MODEL = "spiece.model"
CAMEMBERT = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"), 1


def bpe_json(path: epath.Path) -> bytes:
    """Returns the tokenizer.json of a vocab.json with its merges.txt, of RoBERTa or GPT-2.

    Raises `UserError` if they are no byte-level BPE with their special pieces.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    content, merges = read_file(path), read_file(path.parent / "merges.txt")
    try:
        vocabulary = parse_json(content, dict[str, int])
        lines = [line.rstrip("\r") for line in merges.decode().split("\n")]
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        if wrong := [" ".join(pair) for pair in pairs if len(pair) != 2]:
            raise ValueError(f"merges.txt has the line {wrong[0]!r}, which is not a pair of pieces")
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    except Exception as error:  # the library's own has no other type
        raise UserError(f"tokenizer.path: {path} and its merges.txt are no byte-level BPE ({error})") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if END_OF_TEXT in vocabulary and FAIRSEQ[0] not in vocabulary:  # RoBERTa has all pieces of GPT-2 as well
        tokenizer.add_special_tokens([END_OF_TEXT])
    else:
        _surround(tokenizer, path)
    return tokenizer.to_str().encode()


def unigram_json(path: epath.Path) -> bytes:
    """Returns the tokenizer.json of a spiece.model, XLNet's, or of a sentencepiece.bpe.model: CamemBERT's if a file
    beside it says so, else XLM-R's.

    Raises `UserError` if it is no SentencePiece model of unigrams, or lacks special pieces.
    """
    from tokenizers import normalizers

    scored, charsmap = read_unigrams(path)
    if path.name == XLNET_MODEL:
        return _xlnet_json(path, scored, charsmap)
    first, left_out = CAMEMBERT if _is_camembert(path.parent) else XLM_R
    pieces = [*((piece, 0.0) for piece in first), *scored[left_out:], ("<mask>", 0.0)]
    tokenizer = _of_words(pieces, first.index("<unk>"))
    tokenizer.normalizer = normalizers.Precompiled(charsmap)
    tokenizer.add_special_tokens([piece for piece in first if piece not in FAIRSEQ])
    _surround(tokenizer, path)
    return tokenizer.to_str().encode()


def _xlnet_json(path: epath.Path, scored: list[tuple[str, float]], charsmap: bytes) -> bytes:
    """Returns the tokenizer.json of XLNet's pieces, as transformers' XLNetTokenizer: quotation marks are unified, and
    accents are stripped; case is folded if tokenizer_config.json says so. No piece is a digit and a comma, if others
    can be had: XLNet's code divides these, and transformers' converter makes them unlikely by so much."""
    from tokenizers import AddedToken, Regex, normalizers, processors

    names = [piece for piece, _ in scored]
    if missing := [piece for piece in XLNET if piece not in names]:
        raise UserError(
            f"tokenizer.path: {path} lacks {', '.join(missing)}, which XLNet has; no other {path.name} is read"
        )
    scored = [(piece, score - 100 * bool(re.search(r"\d,$", piece))) for piece, score in scored]
    tokenizer, settings = _of_words(scored, names.index("<unk>")), _settings_beside(path)
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [] if settings.get("keep_accents") else [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase()] if settings.get("do_lower_case") else []
    steps += [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])
    others = [piece for piece in ("<s>", "</s>", "<eop>", "<eod>") if piece in names]
    tokenizer.add_special_tokens([AddedToken(piece, lstrip=piece == "<mask>") for piece in (*others, *XLNET)])
    single, pair = "$A:0 <sep>:0 <cls>:2", "$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2"
    ends = [(piece, names.index(piece)) for piece in ("<sep>", "<cls>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    return tokenizer.to_str().encode()


def _of_words(pieces: list[tuple[str, float]], unk_id: int):
    """Makes a tokenizer of the tokenizers library that has unigrams of the words between spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unk_id, byte_fallback=False))
    metaspace = dict(replacement="\u2581", prepend_scheme="always")
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**metaspace)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(words), decoders.Metaspace(**metaspace)
    return tokenizer


def _settings_beside(path: epath.Path) -> dict:
    """Returns the content of the tokenizer_config.json beside a file; empty if there is none."""
    settings = path.parent / "tokenizer_config.json"
    return read_json(settings) if settings.exists() else {}


def _is_camembert(folder: epath.Path) -> bool:
    """Whether config.json or tokenizer_config.json says that a folder is a CamemBERT's."""
    stated = (("config.json", "model_type"), ("tokenizer_config.json", "tokenizer_class"))
    return any(
        str(read_json(folder / name).get(field)).lower().startswith("camembert")
        for name, field in stated
        if (folder / name).exists()
    )


def _surround(tokenizer, path: epath.Path) -> None:
    """Makes fairseq's pieces special, and has them surround texts. Raises `UserError` if one is missing."""
    from tokenizers import AddedToken, processors

    if missing := [piece for piece in FAIRSEQ if tokenizer.token_to_id(piece) is None]:
        raise UserError(f"tokenizer.path: {path} lacks {', '.join(missing)}, which RoBERTa has")
    tokenizer.add_special_tokens([AddedToken(piece, lstrip=piece == "<mask>", normalized=False) for piece in FAIRSEQ])
    ends = [(piece, tokenizer.token_to_id(piece)) for piece in ("<s>", "</s>")]
    single, pair = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)

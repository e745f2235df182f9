"""A checkpoint of anybody's, in our terms: a Hugging Face folder, Google's TF1 checkpoint, or a workdir of ours."""

import dataclasses
import re

import flax.traverse_util
import jax
from etils import epath

from bertjax.config import BertConfig, UserError, bert_config, default_config
from bertjax.interop import huggingface, tf1
from bertjax.interop.variables import to_variables
from bertjax.model.bert import count_parameters
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.training import checkpoint, run_folder

FORMATS = ("bertjax", "huggingface", "tf1")
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Params (NumPy, float32, our layout; heads may be missing), the model they are of, and its tokenizer."""

    path: str
    format: str
    config: BertConfig
    params: dict
    tokenizer: Tokenizer | None
    ignored: list[str]  # names in the files that are nothing of BERT's
    architecture: str = ""  # the class of transformers that it is, where that is known
    labels: tuple[str, ...] = ()  # of a classifier
    head: dict = dataclasses.field(default_factory=dict)  # what the model needs besides; `config.head` of a run of ours


def read(path: epath.PathLike) -> Pretrained:
    """Reads a checkpoint of any of the `FORMATS`. Raises `UserError` where there is none, or it is not whole."""
    kind, folder, prefix = find(path)
    config = read_config(path)
    if kind == "bertjax":
        params, ignored = checkpoint.read_params(folder), []
    elif kind == "huggingface":
        params, ignored = huggingface.read_params(folder, config)
    else:
        params, ignored = tf1.read_params(prefix, config)
    pieces = read_tokenizer(path)
    if pieces is not None and pieces.vocab_size > config.vocab_size:
        raise UserError(f"{folder}: its tokenizer has {pieces.vocab_size} pieces, its model only {config.vocab_size}")
    return Pretrained(str(path if prefix else folder), kind, config, params, pieces, ignored, *read_head(path))


def read_config(path: epath.PathLike) -> BertConfig:
    """The model of a checkpoint, without reading its arrays."""
    kind, folder, _ = find(path)
    if kind == "bertjax":
        return bert_config(run_folder.read_config(folder))
    module = huggingface if kind == "huggingface" else tf1
    return module.read_config(folder / module.CONFIG)


def read_head(path: epath.PathLike) -> tuple[str, tuple[str, ...], dict]:
    """`architecture`, `labels` and `head` of a `Pretrained`, empty where they are not known."""
    kind, folder, _ = find(path)
    if kind == "huggingface":
        return *huggingface.read_head(folder / huggingface.CONFIG), {}
    stored = run_folder.read_config(folder) if kind == "bertjax" else {}
    return stored.get("architecture", ""), tuple(stored.get("labels", ())), dict(stored.get("head", {}))


def read_tokenizer(path: epath.PathLike) -> Tokenizer | None:
    """The tokenizer that a checkpoint brings: of ours, or `tokenizer.model`, `tokenizer.json` or `vocab.txt`."""
    kind, folder, _ = find(path)
    if kind == "bertjax":
        return run_folder.load_tokenizer(folder)
    file = _tokenizer_file(folder)
    if file is None:
        return None
    if file.name == tokenizer.SentencePiece.filename:
        return tokenizer.load("sentencepiece", file)
    return tokenizer.load("wordpiece", file, lowercase=_is_uncased(folder, file))


def require_tokenizer(config) -> Tokenizer:
    """That of `config.tokenizer`, or else of `config.init_checkpoint`, for the model that has been adopted from it.

    Raises `UserError` where there is none, or it is not one for this model.
    """
    if path := config.tokenizer.path:
        found = tokenizer.load(config.tokenizer.kind, path, config.tokenizer.lowercase)
        if found.vocab_size > (size := config.model.vocab_size):
            raise UserError(f"config.tokenizer.path = {path!r}: {found.vocab_size} pieces, but the model has {size}")
        check_tokenizer(config.init_checkpoint, found)
        return found
    if (found := read_tokenizer(config.init_checkpoint)) is None:
        raise UserError(
            f"config.tokenizer.path = '': {config.init_checkpoint} brings no vocabulary; name the vocab.txt it was "
            f"trained with"
        )
    return found


def find(path: epath.PathLike) -> tuple[str, epath.Path, epath.Path | None]:
    """(format, folder, TF1 prefix) of a checkpoint. Raises `UserError` where there is none."""
    path = epath.Path(path)
    if (best := path / run_folder.BEST).is_file():  # of a search
        path = path / best.read_text().strip()
    if (path / checkpoint.FOLDER).is_dir():
        return "bertjax", path, None
    if (path / huggingface.CONFIG).exists() and "task" in huggingface.read_json(path / huggingface.CONFIG):
        raise UserError(f"{path}: a run that has saved no checkpoint yet")
    has_tf1 = (path / f"{tf1.PREFIX}.index").exists() and not list(path.glob("*.safetensors"))
    if (path / huggingface.CONFIG).exists() and not has_tf1:
        return "huggingface", path, None
    for prefix in (epath.Path(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", str(path))), path / tf1.PREFIX):
        if prefix.with_name(prefix.name + ".index").exists():
            return "tf1", prefix.parent, prefix
    raise UserError(
        f"no checkpoint in {str(path)!r}: give the workdir of a run, a Hugging Face folder (config.json and "
        f"model.safetensors), or Google's bert_model.ckpt"
    )


def _tokenizer_file(folder: epath.Path) -> epath.Path | None:
    names = (tokenizer.SentencePiece.filename, "tokenizer.json", tokenizer.WordPiece.filename)
    return next((folder / name for name in names if (folder / name).exists()), None)


def _is_uncased(folder: epath.Path, vocabulary: epath.Path) -> bool:
    """As tokenizer_config.json says. Without one: a vocabulary without a capital letter is an uncased one.

    Raises `UserError` for what the vocabulary alone does not say and our WordPiece does not do.
    """
    if (folder / "added_tokens.json").exists():
        known = set(tokenizer.load("wordpiece", vocabulary).pieces)
        if added := sorted(set(huggingface.read_json(folder / "added_tokens.json")) - known):
            raise UserError(f"{folder / 'added_tokens.json'}: adds {', '.join(added[:3])}, which is not supported")
    path = folder / "tokenizer_config.json"
    settings = huggingface.read_json(path) if path.exists() else {}
    lowercase, strips = settings.get("do_lower_case"), settings.get("strip_accents")
    if strips is not None and strips != lowercase:
        raise UserError(f"{path}: strip_accents {strips} with do_lower_case {lowercase} is not supported")
    if settings.get("tokenize_chinese_chars", True) is not True:
        raise UserError(f"{path}: tokenize_chinese_chars false is not supported")
    if isinstance(lowercase, bool):
        return lowercase
    pieces = tokenizer.load("wordpiece", vocabulary).pieces
    return not any(re.search("[A-Z]", piece) for piece in pieces if not re.fullmatch(r"\[.*\]", piece))


def adopt(config) -> None:
    """Sets what `config.init_checkpoint` decides: activation, LayerNorm's epsilon and, where the config names neither
    tokenizer nor records, the tokenizer. Raises `UserError` where the sizes of the model differ."""
    path = config.init_checkpoint
    theirs = read_config(path)
    if wrong := {name: getattr(theirs, name) for name in SIZES if config.model[name] != getattr(theirs, name)}:
        name, value = next(iter(wrong.items()))
        flags = " ".join(f"--config.model.{field}={size}" for field, size in wrong.items())
        raise UserError(f"config.model.{name} = {config.model[name]}: {path} has {value}; set {flags}")
    config.model.update(hidden_act=theirs.hidden_act, layer_norm_eps=theirs.layer_norm_eps)
    if config.tokenizer.path or config.data.records or (pieces := read_tokenizer(path)) is None:
        return
    config.tokenizer.update(kind=pieces.kind, path=str(_tokenizer_file(find(path)[1])), lowercase=pieces.lowercase)


def adopt_model(config) -> None:
    """Sets all of the model but dropout to that of `config.init_checkpoint`, for fine-tuning, which only adds to it.

    Raises `UserError` where the config asks for other sizes, or for longer sequences than the model has positions for.
    """
    path, ours = config.init_checkpoint, BertConfig()
    theirs = read_config(path)
    for name in SIZES:
        if config.model[name] not in (getattr(ours, name), getattr(theirs, name)):
            raise UserError(
                f"config.model.{name} = {config.model[name]}: {path} has {getattr(theirs, name)}; leave it out"
            )
    if config.max_seq_length > theirs.max_position_embeddings:
        raise UserError(
            f"config.max_seq_length = {config.max_seq_length}: {path} has {theirs.max_position_embeddings} positions "
            f"only; set --config.max_seq_length={theirs.max_position_embeddings} or less"
        )
    config.model.update({name: getattr(theirs, name) for name in (*SIZES, "hidden_act", "layer_norm_eps")})


def check_tokenizer(path: epath.PathLike, ours: Tokenizer) -> None:
    """Says how many pieces differ from a checkpoint's own. Raises `UserError` where it is more than a tenth: a few
    replaced ones, such as `[unused1]`, learn something new; a vocabulary of another order makes nonsense."""
    theirs = read_tokenizer(path)
    if theirs is None or theirs.fingerprint == ours.fingerprint:
        return
    different = sum(a != b for a, b in zip(ours.pieces, theirs.pieces))
    if not different and ours.lowercase != theirs.lowercase:
        raise UserError(f"config.tokenizer.lowercase = {ours.lowercase}: {path} was trained with {theirs.lowercase}")
    said = f"{different} of the first {len(theirs.pieces)} pieces of the tokenizer are not those of {path}"
    if different > 0.1 * len(theirs.pieces):
        raise UserError(f"config.init_checkpoint: {said}; use its tokenizer, also for records")
    if jax.process_index() == 0:
        print(said, flush=True)


def initialize(params: dict, path: epath.PathLike, encoder_only: bool = False) -> dict:
    """Puts what a checkpoint has in the places of `params`, laid out as they are, and says what that was.

    `encoder_only`: not the output layers, which may have been learnt for something else.

    Raises `UserError` where a shape differs.
    """
    pretrained = read(path)
    ours = flattened(params)
    theirs = flattened(pretrained.params)
    unused = [name for name in theirs if name not in ours or (encoder_only and not name.startswith("bert/"))]
    theirs = {name: array for name, array in theirs.items() if name not in unused}
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name].shape != theirs[name].shape:
            raise UserError(
                f"config.init_checkpoint = {str(path)!r}: {name} has shape {theirs[name].shape}, but the model of this "
                f"config {ours[name].shape}"
            )
    loaded = {name: jax.device_put(theirs[name], x.sharding) if name in theirs else x for name, x in ours.items()}
    if jax.process_index() == 0:
        fresh = sorted(ours.keys() - theirs.keys())
        said = [f"started from {path} ({pretrained.format}): {len(ours) - len(fresh)} of {len(ours)} arrays loaded"]
        for what, names in (("left fresh", fresh), ("not used", sorted(unused) + pretrained.ignored)):
            if names:
                said.append(f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' * (len(names) > 8)}")
        print("; ".join(said), flush=True)
    return flax.traverse_util.unflatten_dict(loaded, sep="/")


def convert(source: epath.PathLike, output: epath.PathLike, to: str, architecture: str = "") -> str:
    """Writes `source` to the folder `output` in one of the `FORMATS`; returns one line that says what was done."""
    output = epath.Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output={output}: exists and is not empty; name a new folder")
    if architecture and to != "huggingface":
        raise UserError(f"--architecture={architecture}: only for --format=huggingface")
    if architecture and architecture not in huggingface.ARCHITECTURES:
        known = ", ".join(huggingface.ARCHITECTURES)
        raise UserError(f"--architecture={architecture}: choose one of {known}")
    pretrained, left_out = read(source), []
    if pretrained.head and to != "bertjax":  # it stands on a BERT that is as it was; nobody else has such a class
        left_out = sorted(pretrained.params.keys() - {"bert"})
        encoder = {"bert": pretrained.params["bert"]}
        pretrained = dataclasses.replace(pretrained, params=encoder, architecture="", labels=(), head={})
    threshold = run_folder.null_threshold(pretrained.path) if pretrained.format == "bertjax" else None
    if threshold is not None and to != "bertjax":
        left_out.append(f"the odds above which there is no answer ({threshold:.4g})")
    if to == "huggingface":
        variables = to_variables(pretrained.params, pretrained.config)
        architecture = architecture or huggingface.choose_architecture(variables, pretrained.architecture)
        left_out += huggingface.write(
            output, pretrained.config, pretrained.params, pretrained.tokenizer, architecture, pretrained.labels
        )
    elif to == "tf1":
        tf1.write(output, pretrained.config, pretrained.params, pretrained.tokenizer)
    else:
        config = default_config().unlock()
        config.model.update(dataclasses.asdict(pretrained.config))
        config.update(architecture=pretrained.architecture, labels=pretrained.labels, head=pretrained.head)
        if threshold is not None:
            config.null_threshold = threshold
        checkpoint.write_params(output, pretrained.params)
        run_folder.write_config(output, config, pretrained.tokenizer)
    size = count_parameters(pretrained.params, pretrained.config)
    said = [f"{pretrained.format} -> {to}: {size:,} params in {output}"]
    if left_out:
        said.append(f"left out, for which {architecture or 'it'} has no place: {', '.join(left_out[:8])}")
    if pretrained.tokenizer is None:
        said.append("no tokenizer was found beside it")
    if pretrained.ignored:
        said.append(f"left out, not of BERT's: {', '.join(pretrained.ignored[:8])}")
    return "; ".join(said)


def flattened(params: dict) -> dict:
    """Arrays by path: "bert/pooler/dense/kernel"."""
    return flax.traverse_util.flatten_dict(params, sep="/")

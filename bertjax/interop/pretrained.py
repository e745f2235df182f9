"""Reads checkpoints of any supported format.

The formats are a bertjax workdir, a Hugging Face folder, a folder of sentence-transformers, an adapter of PEFT with its
base, and a TF1 checkpoint of Google. The Hugging Face hub may contain the folders.
"""

import dataclasses
import re
from typing import Any

import flax.traverse_util
import ml_collections
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import inside, note, read_json, read_whole
from bertjax.config.model_config import BertConfig
from bertjax.interop import hub, huggingface, peft_adapter, sentence_transformers, tf1
from bertjax.interop.checkpoint_content import Pretrained
from bertjax.interop.places import AdapterPlace, Place, RunPlace, Tf1Place, TransformersPlace
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints import checkpoint, workdir

FORMATS = ("bertjax", "huggingface", "tf1")  # formats of whole models
WHICH = re.compile(r"(.*)@(latest|best|\d+)")  # a path with a choice of checkpoint: "runs/mrpc@best", "runs/mrpc@75"
BEST_RUN = "best"  # file in the workdir of a sweep with the path of the best run, such as "runs/seed=1"


def read_pretrained(path: epath.PathLike) -> Pretrained:
    """Reads a checkpoint of any supported format, with its params as NumPy arrays.

    Args:
      path: the checkpoint:
        - the workdir of a bertjax run. The best checkpoint is read after fine-tuning, and the latest checkpoint after
          pre-training, unless the path ends in "@best", "@latest" or "@STEP";
        - the workdir of a sweep, for its best run;
        - a folder of transformers or sentence-transformers, or an adapter of PEFT, whose base is read too;
        - "hub:NAME" or "hub:NAME@REVISION", a repository of the Hugging Face hub, which is downloaded;
        - Google's bert_model.ckpt, or the folder with this checkpoint.

    Returns:
      The checkpoint. `tokenizer` is None if there is no tokenizer beside the checkpoint.

    Raises:
      UserError: if the checkpoint is missing, incomplete, damaged or not supported.
    """
    return find(path).read()


def read_with_tokenizer(path: epath.PathLike, dtype: str | None = None) -> Pretrained:
    """Reads a checkpoint, and prints a note if weights in the files are not read.

    Args:
      path: the path, as of `read_pretrained`.
      dtype: replaces the `dtype` of the checkpoint.

    Raises:
      UserError: the checkpoint is missing or incomplete, or has no tokenizer.
    """
    source = read_pretrained(path)
    tokenizer_of(source)
    if source.format in ("huggingface", "peft") and (names := sorted(source.ignored)):
        note(epath.Path(source.path), f"ignored weights: {shortened(names)}")
    return dataclasses.replace(source, dtype=dtype or source.dtype)


def tokenizer_of(source: Pretrained) -> Tokenizer:
    """Returns the tokenizer of a checkpoint. Raises `UserError` for a checkpoint without a tokenizer."""
    if source.tokenizer is None:
        raise UserError(f"{source.path}: no tokenizer beside the checkpoint; add vocab.txt or tokenizer.json")
    return source.tokenizer


def shortened(names: list[str]) -> str:
    """Returns a text with the first names of a list, and the number of the other names."""
    return ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)


def read_config(path: epath.PathLike) -> BertConfig:
    """Reads the model config of a checkpoint, without the arrays."""
    return find(path).read_config()


def read_settings(path: epath.PathLike) -> tuple[str, ml_collections.ConfigDict]:
    """Reads `architecture` and `settings` of a checkpoint, without the arrays."""
    return find(path).read_settings()


def read_tokenizer(path: epath.PathLike) -> Tokenizer | None:
    """Reads the tokenizer of a checkpoint; None for a checkpoint without a tokenizer."""
    return find(path).read_tokenizer()


def find(path: epath.PathLike) -> Place:
    """Locates a checkpoint. Downloads a checkpoint of the hub. Raises `UserError` if the path has no checkpoint."""
    repository, which = hub.repository(path), ""
    path = hub.download_repository(repository) if repository else epath.Path(path)
    if (chosen := WHICH.fullmatch(str(path))) and not path.exists():
        path, which = epath.Path(chosen[1]), chosen[2]
    if (best := path / BEST_RUN).is_file():  # the folder of a sweep
        path = inside(path, read_whole(best).decode(errors="replace").strip(), best)
    if (path / checkpoint.FOLDER).is_dir():
        info = workdir.require_info(path)
        default = "best" if info.architecture and checkpoint.best_step(path) is not None else "latest"
        return RunPlace(path, info, checkpoint.resolve_step(path, which or default))
    if (path / workdir.TRIAL_RESULT).exists():
        raise UserError(
            f"{path}: not the best trial of the sweep, so that the checkpoint was deleted; choose the best trial"
        )
    if which:
        raise UserError(f"@{which} needs the workdir of a run, and {str(path)!r} is not a workdir")
    is_run = (path / huggingface.CONFIG).exists() and "task" in read_json(path / huggingface.CONFIG)
    if not is_run and (place := _find_folder(path) or _find_tf1(path)) is not None:
        return place
    has_vocabulary = any((path / name).exists() for name in ("vocab.txt", "tokenizer.model", "tokenizer.json"))
    # A run writes its records before its config. The folder of a vocabulary can contain records, too.
    if is_run or ((path / "records").is_dir() and not has_vocabulary):
        raise UserError(
            f"{path}: the run has no checkpoint yet; wait for the first checkpoint, or start the command of the run "
            f"again"
        )
    if not path.exists() and (adapters := peft_adapter.adapters_in(path.parent)):
        raise UserError(f"no checkpoint in {str(path)!r}: the adapters in {path.parent} are {', '.join(adapters)}")
    raise UserError(
        f"no checkpoint in {str(path)!r}: give the workdir of a run, a Hugging Face folder (config.json and "
        f"model.safetensors), an adapter of PEFT, hub:NAME for a model of the hub, or Google's bert_model.ckpt"
    )


def _find_folder(path: epath.Path) -> Place | None:
    """Locates a folder of sentence-transformers, transformers or PEFT; None for other paths."""
    modules = sentence_transformers.open_folder(path) if sentence_transformers.has_modules_file(path) else None
    folder = modules.encoder if modules else path
    if peft_adapter.is_adapter_folder(folder):
        return AdapterPlace(folder, modules, base=_find_base(folder))
    has_tf1 = (folder / f"{tf1.PREFIX}.index").exists() and not list(folder.glob("*.safetensors"))
    if modules or ((folder / huggingface.CONFIG).exists() and not has_tf1):
        return TransformersPlace(folder, modules)
    return None


def _find_tf1(path: epath.Path) -> Place | None:
    """Locates a TF1 checkpoint by its folder, its prefix, or one of its files; None for other paths."""
    for prefix in (epath.Path(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", str(path))), path / tf1.PREFIX):
        if prefix.name and prefix.with_name(prefix.name + ".index").exists():  # "/" has no name
            return Tf1Place(prefix.parent, prefix)
    return None


def _find_base(adapter: epath.Path) -> Place:
    """Locates the base of an adapter.

    The base is a path: absolute, or relative to the working directory, to the folder of the adapter, or to the parent
    of this folder. If there is no such path, the base is the model in the parent, as for the adapters of Jina
    Embeddings v3, or else a model on the hub.

    Raises `UserError` if the base is missing, or if the base is an adapter.
    """
    source, fields = adapter / peft_adapter.CONFIG, peft_adapter.read_adapter_fields(adapter)
    name, parent = fields.base_model_name_or_path or "", adapter.absolute().parent
    paths = (epath.Path(name), adapter / name, parent / name) if name else ()
    path = next((str(path) for path in paths if path.exists() and path.resolve() != adapter.resolve()), "")
    if not path and (parent / huggingface.CONFIG).exists() and not peft_adapter.is_adapter_folder(parent):
        note(
            source, f"the base is the model in {parent}, which contains the adapter; base_model_name_or_path: {name!r}"
        )
        path = str(parent)
    if not path and not name:
        raise UserError(
            f"{source}: base_model_name_or_path is {fields.base_model_name_or_path!r}; set it to the folder of the "
            f"base, or to the name of the base on the hub"
        )
    if not path and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise UserError(
            f"{source}: the base of the adapter, base_model_name_or_path {name!r}, does not exist; set it to the "
            f"folder of the base, or to the name of the base on the hub"
        )
    revision = f"@{fields.revision}" if fields.revision else ""
    try:
        # Looks at the folder before `find`, which would not end if the base names this adapter as its base.
        is_adapter = bool(path) and peft_adapter.is_adapter_folder(epath.Path(path))
        place = None if is_adapter else find(path or f"{hub.PREFIX}{name}{revision}")
        if place is None or place.format == "peft":
            raise UserError(f"is an adapter itself; {peft_adapter.MERGE}")
    except UserError as error:
        raise UserError(f"{source}: the base of the adapter, base_model_name_or_path {name!r}: {error}") from None
    return place


def flattened(params: dict) -> dict[str, Any]:
    """Returns {path: array} of params, with paths such as "bert/pooler/dense/kernel"."""
    return flax.traverse_util.flatten_dict(params, sep="/")

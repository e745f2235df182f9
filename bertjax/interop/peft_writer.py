"""Writes the low-rank updates of a run as an adapter of PEFT."""

import json
from collections.abc import Collection, Mapping

import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.interop import huggingface
from bertjax.interop.peft_adapter import CONFIG, PREFIX, WEIGHTS
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.family import WORD_EMBEDDINGS

NEGLIGIBLE = 1e-6  # singular values below this share of the largest value are rounding errors of float32


def write(
    folder: epath.PathLike,
    source: Pretrained,
    architecture: str,
    base: str = "",
    revision: str = "",
    has_words: bool = False,
) -> int:
    """Writes the low-rank updates and the heads of a run as an adapter, and the tokenizer.

    The updates are factorized again, since one matrix of PyTorch may contain several kernels. A and B change, but their
    product does not. `peft.PeftModel.from_pretrained(model, folder)` adds the adapter to a model of transformers.

    Args:
      folder: the folder.
      source: the run.
      architecture: the class of transformers.
      base: the name of the base model, on the hub or of a folder.
      revision: the revision of the base on the hub.
      has_words: whether to write the word embeddings as well, because the vocabulary of the base is smaller.

    Returns:
      The number of values of the adapter.

    Raises:
      UserError: the checkpoint has no updates, or lacks layers of its base.
    """
    _check_layers(source)
    folder, layout = epath.Path(folder), families.huggingface_of(source.config)
    params = flatten_dict(source.params)
    zeros = {path: np.zeros_like(x) for path, x in params.items()}

    def named(arrays: Mapping[tuple[str, ...], np.ndarray]) -> dict[str, np.ndarray]:
        return layout.to_tensors(unflatten_dict(arrays), source.config, architecture)[0]

    def names_of(paths: Collection[tuple[str, ...]]) -> list[str]:
        """Returns the names of the tensors that contain params."""
        marked = named(zeros | {path: zeros[path] + 1 for path in paths})
        return sorted(name for name, x in marked.items() if x.any())

    low_rank = {path: np.asarray(update) for path, update in source.updates.items()}
    updates = {name: x for name, x in named(zeros | low_rank).items() if x.any()}
    _check_updates(source, updates)
    factors = {name.removesuffix(".weight"): _factorized(x) for name, x in updates.items()}
    saved = names_of([path for path in zeros if path[0] != "bert" or path[1] == "pooler"])
    tables = names_of([("bert", *WORD_EMBEDDINGS)]) if has_words else []
    whole = named(params)
    tensors = {PREFIX + name: whole[name] for name in (*saved, *tables)}
    rank = max(len(a) for a, _ in factors.values())
    for name, (a, b) in factors.items():
        padding = (0, rank - len(a))
        tensors[f"{PREFIX}{name}.lora_A.weight"] = np.pad(a, (padding, (0, 0)))
        tensors[f"{PREFIX}{name}.lora_B.weight"] = np.pad(b, ((0, 0), padding))
    kind = layout.to_fields(source.config)["model_type"].replace("-", "_")
    library = f"transformers.models.{kind}.modeling_{kind}"
    fields = {
        "peft_type": "LORA",
        "auto_mapping": {"base_model_class": architecture, "parent_library": library},
        "base_model_name_or_path": base or None,
        "revision": revision or None,
        "r": rank,
        "lora_alpha": rank,  # so that the product is the update
        "lora_dropout": source.settings.lora.dropout,
        "target_modules": sorted(factors),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}),
        "bias": "none",
        "inference_mode": True,
    }
    huggingface.write_tensors(folder / WEIGHTS, tensors)
    write_whole(folder / CONFIG, json.dumps(fields, indent=2) + "\n")
    if source.tokenizer is not None:
        for name, content in huggingface.tokenizer_definition(source.config, source.tokenizer).items():
            write_whole(folder / name, content)
        source.tokenizer.save(folder)
    return sum(x.size for x in tensors.values())


def _check_updates(source: Pretrained, updates: Collection[str]) -> None:
    """Raises `UserError` if there are no updates, or if an update is not the weight of a layer of transformers."""
    if unsupported := [name for name in updates if not name.endswith(".weight")]:
        raise UserError(
            f"{source.path}: PEFT cannot store {unsupported[0]}, because transformers has no layer for this param; use "
            f"--format=huggingface"
        )
    if not updates:
        raise UserError(f"{source.path}: has no low-rank updates; use --format=huggingface")


def _check_layers(source: Pretrained) -> None:
    """Raises `UserError` if PEFT cannot add the updates of a run to the layers of its base."""
    if "lstm" in source.params:
        raise UserError(f"{source.path}: transformers has no class for a BiLSTM; use --format=bertjax")
    if source.settings.get("keep_layers"):
        raise UserError(f"{source.path}: has fewer layers than init_checkpoint (keep_layers); use --format=huggingface")


def _factorized(update: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A `[rank, inputs]` and B `[outputs, rank]` such that B A is the update `[outputs, inputs]`."""
    left, sizes, right = np.linalg.svd(update.astype(np.float64), full_matrices=False)
    rank = int((sizes > NEGLIGIBLE * sizes[0]).sum())
    root = np.sqrt(sizes[:rank])
    return (root[:, None] * right[:rank]).astype(np.float32), (left[:, :rank] * root).astype(np.float32)

"""Writes the low-rank updates of a run as an adapter of PEFT."""

import json
from collections.abc import Mapping

import jax
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

NEGLIGIBLE = 1e-6  # a share of the largest singular value that float32's rounding leaves


def write(
    folder: epath.PathLike,
    source: Pretrained,
    architecture: str,
    base: str = "",
    revision: str = "",
    has_words: bool = False,
) -> int:
    """Writes an adapter for a class of transformers, and its tokenizer; returns how many numbers the adapter has.

    Args:
      base: the name of the model that it is for, on the hub or of a folder.
      has_words: writes the word embeddings as well, since the vocabulary of the base is smaller.

    Raises `UserError` if the checkpoint has no updates, or not all layers of the model that it began with.
    """
    import safetensors.numpy

    if "lstm" in source.params:
        raise UserError(f"{source.path}: transformers has no class for its BiLSTM; only --format=bertjax keeps it")
    if source.settings.get("keep_layers"):
        raise UserError(f"{source.path}: has not all layers of its init_checkpoint; write it with --format=huggingface")
    folder, layout = epath.Path(folder), families.huggingface_of(source.config)
    words = ("bert", *WORD_EMBEDDINGS)
    zeros = {path: np.zeros_like(x) for path, x in flatten_dict(source.params).items()}

    def named(arrays: Mapping) -> dict[str, np.ndarray]:
        return layout.to_tensors(unflatten_dict(arrays), source.config, architecture)[0]

    updates = named(zeros | source.updates)
    if alone := [name for name, x in updates.items() if x.any() and not name.endswith(".weight")]:
        raise UserError(
            f"{source.path}: {alone[0]} is in no layer of its own in transformers, and PEFT adds to layers only; write "
            f"it with --format=huggingface"
        )
    saved = named({path: x + (path[0] != "bert" or path[1] == "pooler") for path, x in zeros.items()})
    saved = sorted(name for name, x in saved.items() if x.any())
    tables = [name for name, x in named(zeros | {words: zeros[words] + 1}).items() if x.any()] if has_words else []
    whole = named(flatten_dict(source.params))

    factors = {name.removesuffix(".weight"): _factorized(x) for name, x in updates.items() if x.any()}
    if not factors:
        raise UserError(f"{source.path}: has no low-rank updates; write it with --format=huggingface")
    rank = max(len(a) for a, _ in factors.values())
    tensors = {PREFIX + name: whole[name] for name in (*saved, *tables)}
    for name, (a, b) in factors.items():
        more = rank - len(a)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = np.pad(a, ((0, more), (0, 0)))
        tensors[f"{PREFIX}{name}.lora_B.weight"] = np.pad(b, ((0, 0), (0, more)))
    kind = layout.to_fields(source.config)["model_type"].replace("-", "_")
    library = f"transformers.models.{kind}.modeling_{kind}"
    fields = {
        "peft_type": "LORA",
        "auto_mapping": {"base_model_class": architecture, "parent_library": library},
        "base_model_name_or_path": base or None,
        "revision": revision or None,
        "r": rank,
        "lora_alpha": rank,  # the product is the update
        "lora_dropout": source.settings.lora.dropout,
        "target_modules": sorted(factors),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}),
        "bias": "none",
        "inference_mode": True,
    }
    tensors = jax.tree.map(np.ascontiguousarray, tensors)
    write_whole(folder / WEIGHTS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    write_whole(folder / CONFIG, json.dumps(fields, indent=2) + "\n")
    if source.tokenizer is not None:
        for name, content in huggingface.tokenizer_definition(source.config, source.tokenizer).items():
            write_whole(folder / name, content)
        source.tokenizer.save(folder)
    return sum(x.size for x in tensors.values())


def _factorized(update: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A `[rank, inputs]` and B `[outputs, rank]`, whose product B A is the update `[outputs, inputs]`."""
    left, sizes, right = np.linalg.svd(update.astype(np.float64), full_matrices=False)
    rank = int((sizes > NEGLIGIBLE * sizes[0]).sum())
    root = np.sqrt(sizes[:rank])
    return np.float32(root[:, None] * right[:rank]), np.float32(left[:, :rank] * root)

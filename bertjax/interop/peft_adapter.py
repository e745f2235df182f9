"""Adapters of PEFT: the low-rank updates of a run, and what else it trained, without the encoder that it began with.

`peft.PeftModel.from_pretrained(model, folder)` adds one to a model of transformers that has this encoder. The family
says how updates are called and laid out there, as it does of kernels; they are factorized anew, since one of their
matrices may hold several of ours. So A and B are others, but their product is the same.
"""

import json

import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax import families
from bertjax.config import UserError
from bertjax.files import write_whole
from bertjax.interop import hub
from bertjax.interop.pretrained import Pretrained

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NEGLIGIBLE = 1e-6  # a share of the largest singular value that float32's rounding leaves


def write(folder: epath.PathLike, source: Pretrained, architecture: str) -> int:
    """Writes an adapter for a class of transformers; returns how many numbers it has.

    Raises `UserError` if the checkpoint has no updates, or not all layers of the model that it began with.
    """
    import safetensors.numpy

    if "lstm" in source.params:
        raise UserError(f"{source.path}: transformers has no class for its BiLSTM; only --format=bertjax keeps it")
    if source.settings.get("keep_layers"):
        raise UserError(f"{source.path}: has not all layers of its init_checkpoint; write it with --format=huggingface")
    layout = families.module_of(families.of(source.config))
    zeros = {path: np.zeros_like(x) for path, x in flatten_dict(source.params).items()}
    updates, _ = layout.to_tensors(unflatten_dict(zeros | source.updates), source.config, architecture)
    if alone := [name for name, x in updates.items() if x.any() and not name.endswith(".weight")]:
        raise UserError(
            f"{source.path}: {alone[0]} is in no layer of its own in transformers, and PEFT adds to layers only; write "
            f"it with --format=huggingface"
        )
    is_saved = {path: x + (path[0] != "bert" or path[1] == "pooler") for path, x in zeros.items()}
    saved, _ = layout.to_tensors(unflatten_dict(is_saved), source.config, architecture)
    whole, _ = layout.to_tensors(source.params, source.config, architecture)

    factors = {name.removesuffix(".weight"): _factorized(x) for name, x in updates.items() if x.any()}
    if not factors:
        raise UserError(f"{source.path}: has no low-rank updates; write it with --format=huggingface")
    rank = max(len(a) for a, _ in factors.values())
    tensors = {PREFIX + name: whole[name] for name, x in saved.items() if x.any()}
    for name, (a, b) in factors.items():
        more = rank - len(a)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = np.pad(a, ((0, more), (0, 0)))
        tensors[f"{PREFIX}{name}.lora_B.weight"] = np.pad(b, ((0, 0), (0, more)))
    base = hub.repository(started_from := source.settings.get("init_checkpoint", ""))
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": base.name if base else started_from,
        "revision": (base.revision if base else "") or None,
        "r": rank,
        "lora_alpha": rank,  # the product is the update
        "lora_dropout": source.settings.lora.dropout,
        "target_modules": sorted(factors),
        "modules_to_save": sorted({name.rpartition(".")[0] for name, x in saved.items() if x.any()}),
        "bias": "none",
        "inference_mode": True,
    }
    tensors = jax.tree.map(np.ascontiguousarray, tensors)
    write_whole(epath.Path(folder) / WEIGHTS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    write_whole(epath.Path(folder) / CONFIG, json.dumps(fields, indent=2) + "\n")
    return sum(x.size for x in tensors.values())


def _factorized(update: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A `[rank, inputs]` and B `[outputs, rank]`, whose product B A is the update `[outputs, inputs]`."""
    left, sizes, right = np.linalg.svd(update.astype(np.float64), full_matrices=False)
    rank = int((sizes > NEGLIGIBLE * sizes[0]).sum())
    root = np.sqrt(sizes[:rank])
    return np.float32(root[:, None] * right[:rank]), np.float32(left[:, :rank] * root)

"""Exports a checkpoint as programs for JAX: StableHLO by `jax.export`, the params, and a loader of a few lines.

The loader is a copy of `export.loader`, which needs jax, numpy and flatbuffers, but not bertjax.
"""

import inspect
import json
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import export

from bertjax.common.files import write_whole
from bertjax.export import loader
from bertjax.export.outputs import check_exportable_rows, exported_function, new_folder
from bertjax.inference.abilities import task_of
from bertjax.interop.pretrained import Pretrained

PLATFORMS = ("cpu", "cuda", "tpu")
# Lengths of the rows of the programs, in tokens: powers of two, and the number of positions of the model.
SHORTEST, LONGEST = 16, 8192


def write(output: epath.PathLike, source: Pretrained) -> str:
    """Writes the programs of a checkpoint to a folder, and returns a summary in one line.

    The programs compute `bertjax.Model.apply` in float32 on any device, for any number of rows. There is a program for
    each length.

    Raises:
      UserError: the checkpoint cannot be exported (`outputs.check_exportable_rows`), or the folder is not empty.
    """
    check_exportable_rows(source)
    with new_folder(output) as folder:
        lengths = _write(folder, source)
    return f"{source.format} -> stablehlo: {len(lengths)} programs, for up to {lengths[-1]} tokens, in {output}"


def _write(output: epath.Path, source: Pretrained) -> list[int]:
    """Writes the files, and returns the lengths of the programs."""
    run = exported_function(source)
    flat = flax.traverse_util.flatten_dict(jax.tree.map(np.asarray, source.params), sep="/")

    def program(params: dict[str, Any], input_ids: jax.Array, segments: jax.Array, token_types: jax.Array) -> jax.Array:
        batch = {"input_ids": input_ids, "segments": segments, "token_types": token_types}
        return run(flax.traverse_util.unflatten_dict(params, sep="/"), batch, None)

    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in flat.items()}
    most = min(source.config.max_position_embeddings, LONGEST)
    powers = (1 << power for power in range(SHORTEST.bit_length() - 1, most.bit_length()))
    lengths = [*(length for length in powers if length < most), most]
    for length in lengths:
        (rows,) = export.symbolic_shape("rows")
        ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        exported = export.export(jax.jit(program), platforms=PLATFORMS)(shapes, ids, ids, ids)
        write_whole(output / f"length{length}.stablehlo", bytes(exported.serialize()))
    (outputs,) = exported.out_avals
    by_token = len(outputs.shape) > 2
    about = {
        "outputs": ["rows", *(["length"] * by_token), outputs.shape[-1]],
        "of": _kind_of_outputs(source),
        "labels": list(source.labels or ()),
        "lengths": lengths,
        "by_token": by_token,
        "max_seq_length": source.max_seq_length,
        "pad_id": source.tokenizer.pad_id if source.tokenizer else 0,
        "jax": jax.__version__,
    }
    write_whole(output / "about.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    write_whole(output / "load.py", inspect.getsource(loader))
    with (output / "params.npz").open("wb") as file:
        np.savez(file, **flat)
    if source.tokenizer:
        source.tokenizer.save(output)
        write_whole(output / "tokenizer.json", source.tokenizer.to_huggingface())  # for programs without bertjax
    return lengths


def _kind_of_outputs(source: Pretrained) -> str:
    """Returns the task whose logits the programs compute, "words" for logits of words, or "hidden states"."""
    if task_of(source):
        return source.settings.get("task", "") or source.architecture
    return "words" if source.predicts_words else "hidden states"

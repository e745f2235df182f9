"""A checkpoint as programs for JAX: StableHLO by `jax.export`, the params, and a loader of a few lines.

The loader needs jax, numpy and flatbuffers, and nothing of ours.
"""

import json

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import export

from bertjax.common.files import write_whole
from bertjax.export.outputs import check, exported_function, new_folder
from bertjax.inference.abilities import task_of
from bertjax.interop.pretrained import Pretrained

PLATFORMS = ("cpu", "cuda", "tpu")
SHORTEST, LONGEST = 16, 8192  # tokens of the programs' rows: powers of two, up to the model's positions

LOADER = '''"""Runs the programs of this folder; needs jax, numpy and flatbuffers.

    run = load(FOLDER)
    outputs = run(input_ids, segments, token_types)

All are int32 [batch, length]: ids with [CLS] and [SEP], 1 for tokens and 0 for padding, 1 in the second text of a pair.
Without segments, all that is not [PAD] is a token; without token_types, they are 0. What comes out, about.json says.
"""

import json
import pathlib

import jax
import numpy as np
from jax import export


def load(folder=pathlib.Path(__file__).parent):
    folder = pathlib.Path(folder)
    about = json.loads((folder / "about.json").read_text())
    params = {name: jax.device_put(value) for name, value in np.load(folder / "params.npz").items()}
    programs = {}

    def run(input_ids, segments=None, token_types=None):
        ids = np.asarray(input_ids, np.int32)
        segments = (ids != about["pad_id"]) if segments is None else segments
        token_types = np.zeros_like(ids) if token_types is None else token_types
        rows, tokens = ids.shape
        if tokens > about["lengths"][-1]:
            raise ValueError(f"rows of {tokens} tokens: there are programs for up to {about['lengths'][-1]}")
        length = next(length for length in about["lengths"] if length >= tokens)
        if length not in programs:
            content = (folder / f"length{length}.stablehlo").read_bytes()
            programs[length] = jax.jit(export.deserialize(bytearray(content)).call)
        missing = [(0, 0), (0, length - tokens)]
        padded = [np.pad(np.asarray(x, np.int32), missing) for x in (segments, token_types)]
        outputs = programs[length](params, np.pad(ids, missing, constant_values=about["pad_id"]), *padded)
        return np.asarray(outputs)[:, :tokens] if about["by_token"] else np.asarray(outputs)

    return run
'''


def write(output: epath.PathLike, source: Pretrained) -> str:
    """Writes the programs of a checkpoint to a folder; returns a summary in a line.

    They compute in float32, on any device, what `bertjax.Model.apply` does, for any number of rows; each has a length
    of its own. Raises `UserError` as `outputs.new_folder` and `outputs.check` do.
    """
    with new_folder(output) as folder:
        count, longest = _write(folder, source)
    return f"{source.format} -> stablehlo: {count} programs, for up to {longest} tokens, in {output}"


def _write(output: epath.Path, source: Pretrained) -> tuple[int, int]:
    """Returns how many programs are written, and the tokens of the longest rows."""
    check(source)
    run = exported_function(source)
    flat = flax.traverse_util.flatten_dict(jax.tree.map(np.asarray, source.params), sep="/")

    def program(params, input_ids, segments, token_types):
        batch = {"input_ids": input_ids, "segments": segments, "token_types": token_types}
        return run(flax.traverse_util.unflatten_dict(params, sep="/"), batch, None)

    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in flat.items()}
    most = min(source.config.max_position_embeddings, LONGEST)
    lengths = [1 << power for power in range(SHORTEST.bit_length() - 1, most.bit_length()) if 1 << power <= most]
    lengths = lengths if lengths and lengths[-1] == most else [*lengths, most]
    for length in lengths:
        (rows,) = export.symbolic_shape("rows")
        ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        made = export.export(jax.jit(program), platforms=PLATFORMS)(shapes, ids, ids, ids)
        write_whole(output / f"length{length}.stablehlo", bytes(made.serialize()))
    (found,) = made.out_avals
    by_token = len(found.shape) > 2
    about = {
        "outputs": ["rows", *(["length"] * by_token), found.shape[-1]],
        "of": _said(source),
        "labels": list(source.labels or ()),
        "lengths": lengths,
        "by_token": by_token,
        "max_seq_length": source.max_seq_length,
        "pad_id": source.tokenizer.pad_id if source.tokenizer else 0,
        "jax": jax.__version__,
    }
    write_whole(output / "about.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    write_whole(output / "load.py", LOADER)
    with (output / "params.npz").open("wb") as file:
        np.savez(file, **flat)
    if source.tokenizer:
        source.tokenizer.save(output)
        write_whole(output / "tokenizer.json", source.tokenizer.to_huggingface())  # which programs without bertjax read
    return len(lengths), lengths[-1]


def _said(source: Pretrained) -> str:
    """What comes out: the logits of a task, those of words, or hidden states."""
    if task_of(source):
        return source.settings.get("task", "") or source.architecture
    return "words" if source.predicts_words else "hidden states"

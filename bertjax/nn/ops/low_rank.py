"""Low-rank updates of kernels (LoRA, Hu et al. 2021): x W + alpha / rank * dropout(x) A B, with a frozen W.

The updates are a part of `nn.dense.Dense`. qwix, which replaces `dot_general` and `einsum` while a model runs, and
`intercept_methods` of flax do not fit: products have custom gradients, attention kernels read the kernel of queries,
keys and values, and dropout needs the keys of the row and the layer.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from bertjax.common.errors import UserError
from bertjax.config.model_config import Lora

STACKS = {"query_key_value": ("query", "key", "value"), "key_value": ("key", "value")}  # kernels of several matrices
ALL = "all-linear"


def lora_of(config: Any) -> Lora | None:
    """Returns the low-rank updates of a whole config, or None."""
    fields = config.get("lora")
    if not fields or not fields.rank:
        return None
    return Lora(fields.rank, fields.alpha, fields.dropout, tuple(map(str.strip, fields.targets.split(","))))


def matrix_names(path: Sequence[str]) -> list[str]:
    """Returns the names of the matrices in the kernel of the dense layer at a path. Targets match these names."""
    *above, last = path
    return ["/".join([*above, name]) for name in STACKS.get(last, (last,))]


def stacked_matrices(path: Sequence[str]) -> int:
    """Returns the number of matrices that the kernel of a dense layer stacks; 0: the kernel is one matrix."""
    return len(STACKS.get(path[-1], ()))


def targeted(lora: Lora | None, path: Sequence[str]) -> tuple[int, ...]:
    """Returns the indices of the `matrix_names` a dense layer that are targets; () outside of an encoder."""
    if lora is None or "encoder" not in path:
        return ()
    return tuple(i for i, name in enumerate(matrix_names(path)) if any(is_in(target, name) for target in lora.targets))


def is_in(target: str, name: str) -> bool:
    """Returns whether a target matches a name."""
    return target == ALL or f"/{target}/" in f"/{name}/"


def site_of(path: Sequence[str]) -> int:
    """Returns a number for the dropout of the input of a layer."""
    return zlib.crc32("/".join(path).encode()) >> 1


def shapes_of(
    path: Sequence[str],
    parts: Sequence[int],
    inputs: tuple[int, ...],
    features: tuple[int, ...],
    axes: tuple[str | None, ...],
    lora: Lora,
) -> tuple[Any, Any]:
    """Returns the shapes of A and B of a dense layer, see `product`, and their logical axes."""
    before, after = axes[: len(inputs)], axes[len(inputs) :]
    count: tuple[int, ...] = ()
    count_axes: tuple[str | None, ...] = ()
    if stacked_matrices(path):
        count, count_axes, features, after = (len(parts),), after[:1], features[1:], after[1:]
    shapes = (*inputs, *count, lora.rank), (*count, lora.rank, *features)
    return shapes, ((*before, *count_axes, None), (*count_axes, None, *after))


def init_a(key: Array, shape: tuple[int, ...], fan_in: int) -> Array:
    """Returns the initial A, as in PEFT: `kaiming_uniform_(a=sqrt(5))` of PyTorch."""
    return jax.random.uniform(key, shape, jnp.float32, -(fan_in**-0.5), fan_in**-0.5)


def product(a: Array, b: Array, parts: Sequence[int], stack: int) -> Array:
    """Returns A B in the shape of the kernel.

    Args:
      a: `[*inputs, rank]`, or `[hidden, parts, rank]` for a stack.
      b: `[rank, *features]`, or `[parts, rank, heads, size]` for a stack.
      parts: the indices of the matrices in a stack that have an update. The result is 0 for other matrices.
      stack: the number of matrices in the stack; 0: no stack.
    """
    if not stack:
        return jnp.tensordot(a, b, 1)
    update = jnp.einsum("inr,nrhs->inhs", a, b)
    whole = jnp.zeros((len(update), stack, *update.shape[2:]), update.dtype)
    return whole.at[:, jnp.array(parts)].set(update)


def updates_of(params: dict, lora: Lora) -> dict[tuple[str, ...], Array]:
    """Returns the updates of a model by the paths of the kernels."""
    flat, updates = flatten_dict(params), {}
    for *layer, last in flat:
        if last != "lora_a":
            continue
        a, b, kernel = (flat[*layer, name] for name in ("lora_a", "lora_b", "kernel"))
        stack = stacked_matrices(layer)
        update = functools.partial(product, parts=targeted(lora, layer), stack=stack)
        over_layers = a.ndim > 3 if stack else a.ndim + b.ndim > kernel.ndim + 2
        updates[*layer, "kernel"] = lora.scale * jax.device_get((jax.vmap(update) if over_layers else update)(a, b))
    return updates


def merge_updates(params: dict, updates: dict[tuple[str, ...], Array]) -> dict:
    """Returns the params of a model without updates: adds the updates to the kernels."""
    flat = {path: x for path, x in flatten_dict(params).items() if path[-1] not in ("lora_a", "lora_b")}
    return unflatten_dict(flat | {path: flat[path] + update for path, update in updates.items()})


def check_targets(lora: Lora, params: dict, every: dict) -> None:
    """Raises `UserError` if a target is not a kernel. `every` has the params of a model in which all are targets."""
    updated, known = (
        [name for path in flatten_dict(tree) if path[-1] == "lora_a" for name in matrix_names(path[:-1])]
        for tree in (params, every)
    )
    for target in lora.targets:
        if not any(is_in(target, name) for name in updated):
            names = sorted({"/".join(name.split("/")[-2:]) for name in known})
            choice = (
                f"there are {', '.join(names)}, attention and {ALL}"
                if names
                else "the layers of the encoder are not dense"
            )
            raise UserError(f"config.lora.targets: the encoder has no kernel {target!r}; {choice}")

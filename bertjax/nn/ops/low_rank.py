"""Low-rank updates of kernels (LoRA, Hu et al. 2021): x W + alpha / rank * dropout(x) A B, where W is not trained.

They are a part of `attention.Dense`, and not made by qwix, which replaces `dot_general` and `einsum` while a model
runs, or flax's `intercept_methods`: here products have gradients of their own, attention kernels take the kernel of
queries, keys and values as it is, and dropout needs the keys of its row and layer.
"""

import functools
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.common.errors import UserError
from bertjax.config.model_config import Lora

STACKS = {"query_key_value": ("query", "key", "value"), "key_value": ("key", "value")}  # kernels of several matrices
ALL = "all-linear"


def of(config) -> Lora | None:
    """Returns the updates that a whole config asks for, if it does."""
    given = config.get("lora")
    if not given or not given.rank:
        return None
    return Lora(given.rank, given.alpha, given.dropout, tuple(map(str.strip, given.targets.split(","))))


def names_of(path: Sequence[str]) -> list[str]:
    """Returns the names that targets are looked for in, of the kernel of a dense layer at this path."""
    *above, last = path
    return ["/".join([*above, name]) for name in STACKS.get(last, (last,))]


def stacked(path: Sequence[str]) -> int:
    """Returns how many matrices the kernel of a dense layer stacks; 0: it is one itself."""
    return len(STACKS.get(path[-1], ()))


def targeted(lora: Lora | None, path: Sequence[str]) -> tuple[int, ...]:
    """Returns which of `names_of` a dense layer are targets; only those of an encoder can be."""
    if lora is None or "encoder" not in path:
        return ()
    return tuple(i for i, name in enumerate(names_of(path)) if any(is_in(target, name) for target in lora.targets))


def is_in(target: str, name: str) -> bool:
    return target == ALL or f"/{target}/" in f"/{name}/"


def site_of(path: Sequence[str]) -> int:
    """Returns a number for the dropout of a layer's input."""
    return zlib.crc32("/".join(path).encode()) >> 1


def shapes_of(path: Sequence[str], parts: Sequence[int], inputs, features, axes, lora: Lora):
    """Returns the shapes of A and B of a dense layer, see `product`, and their logical axes."""
    before, after, own, own_axes = axes[: len(inputs)], axes[len(inputs) :], (), ()
    if stacked(path):
        own, own_axes, features, after = (len(parts),), after[:1], features[1:], after[1:]
    shapes = (*inputs, *own, lora.rank), (*own, lora.rank, *features)
    return shapes, ((*before, *own_axes, None), (*own_axes, None, *after))


def init_a(key, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """As PEFT's and torch's `kaiming_uniform_(a=sqrt(5))`."""
    return jax.random.uniform(key, shape, jnp.float32, -(fan_in**-0.5), fan_in**-0.5)


def product(a, b, parts: Sequence[int], stack: int):
    """Returns A B in the shape of the kernel.

    `a` is `[*inputs, rank]` and `b` `[rank, *features]`; those of a `stack` of matrices are `[hidden, parts, rank]` and
    `[parts, rank, heads, size]`, and the parts that are no targets are 0.
    """
    if not stack:
        return jnp.tensordot(a, b, 1)
    found = jnp.einsum("inr,nrhs->inhs", a, b)
    whole = jnp.zeros((len(found), stack, *found.shape[2:]), found.dtype)
    return whole.at[:, jnp.array(parts)].set(found)


def updates_of(params: dict, lora: Lora) -> dict[tuple[str, ...], jax.Array]:
    """Returns what is added to the kernels of a model with updates, by their paths."""
    flat, found = flatten_dict(params), {}
    for *layer, last in flat:
        if last != "lora_a":
            continue
        a, b, kernel = (flat[*layer, name] for name in ("lora_a", "lora_b", "kernel"))
        stack = stacked(layer)
        update = functools.partial(product, parts=targeted(lora, layer), stack=stack)
        over_layers = a.ndim > 3 if stack else a.ndim + b.ndim > kernel.ndim + 2
        found[*layer, "kernel"] = lora.scale * jax.device_get((jax.vmap(update) if over_layers else update)(a, b))
    return found


def merge(params: dict, updates: dict[tuple[str, ...], jax.Array]) -> dict:
    """Returns the params of a model without updates: they are added to their kernels."""
    flat = {path: x for path, x in flatten_dict(params).items() if path[-1] not in ("lora_a", "lora_b")}
    return unflatten_dict(flat | {path: flat[path] + update for path, update in updates.items()})


def check_targets(lora: Lora, params: dict, every: dict) -> None:
    """Raises `UserError` if a target is no kernel of the model. `every`: the params if all kernels were targets."""
    updated, known = (
        [name for path in flatten_dict(tree) if path[-1] == "lora_a" for name in names_of(path[:-1])]
        for tree in (params, every)
    )
    for target in lora.targets:
        if not any(is_in(target, name) for name in updated):
            names = sorted({"/".join(name.split("/")[-2:]) for name in known})
            has = f"there are {', '.join(names)}, attention and {ALL}" if names else "its layers are not dense"
            raise UserError(f"config.lora.targets: the encoder has no kernel {target!r}; {has}")

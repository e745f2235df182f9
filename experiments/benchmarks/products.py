"""GFLOP/s of matrix products on this machine, by form and type, in XLA and in torch.

Each pair of a form and a type is compiled once and timed in alternating rounds, for tokens x inputs x outputs:

  x w   forward                              [tokens, inputs] [inputs, outputs]
  g wT  the gradient of x                    [tokens, outputs] [inputs, outputs] transposed
  xT g  the gradient of w                    [tokens, inputs] transposed, [tokens, outputs]
  ours  the gradient of w as `nn.ops.matmul` computes it from float32 arrays

Command:  python -m experiments.benchmarks.products
Needs:    for the comparison, pip install torch
Hardware: a CPU
Score:    see RESULTS.md
"""

import argparse
import functools
import importlib.util
import os

import numpy as np

from experiments.benchmarks.timing import calls_per_second, in_turns, spread, table_header, table_row

SHAPES = "4096x384x1536,4096x1536x384,4096x384x384,512x384x1536,1x384x1536"
FORMS = {"x w": ("ti,io->to", "x", "w"), "g wT": ("to,io->ti", "g", "w"), "xT g": ("ti,to->io", "x", "g")}
# Types of the factors and of the product.
TYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("int8", "int32"))


def factors(shape: tuple[int, int, int], dtype: str) -> dict:
    import jax.numpy as jnp

    tokens, inputs, outputs = shape
    rng = np.random.default_rng(0)
    sizes = dict(x=(tokens, inputs), w=(inputs, outputs), g=(tokens, outputs))
    return {name: jnp.asarray(rng.normal(0, 20, size)).astype(dtype) for name, size in sizes.items()}


def ours(shape, dtype: str, product: str) -> dict:
    """Returns {form: function without arguments that multiplies once, and waits for the result}."""
    import jax
    import jax.numpy as jnp

    from bertjax.config.model_config import Compute
    from bertjax.nn.ops.matmul import project

    arrays = factors(shape, dtype)

    def einsum(form, a, b):
        return jnp.einsum(form, a, b, preferred_element_type=product)

    def gradient(x, w, g):  # only the gradient of w is computed
        return jax.vjp(lambda w: project(x, w, Compute(product, dtype, chip="cpu")), w)[1](g)[0]

    timed = {
        name: functools.partial(jax.jit(functools.partial(einsum, form)), arrays[a], arrays[b])
        for name, (form, a, b) in FORMS.items()
    }
    if (dtype, product) == ("bfloat16", "float32"):
        given = (arrays["x"].astype(product), arrays["w"].astype(product), arrays["g"].astype(product))
        timed["ours"] = functools.partial(jax.jit(gradient), *given)
    return {name: functools.partial(lambda run: run().block_until_ready(), run) for name, run in timed.items()}


def torchs(shape, dtype: str) -> dict:
    import torch

    arrays = {
        name: torch.tensor(np.asarray(x, np.float32)).to(getattr(torch, dtype))
        for name, x in factors(shape, "float32").items()
    }
    return {name: functools.partial(torch.einsum, form, arrays[a], arrays[b]) for name, (form, a, b) in FORMS.items()}


def rates(timed: dict, flops: int, rounds: int, seconds: float) -> dict:
    """Returns {name: GFLOP/s of the rounds} of the products that run."""
    for name, run in list(timed.items()):
        try:
            run()
        except Exception as error:  # the compiler accepts this form, but the run fails
            print(f"  {name}: {str(error).splitlines()[0][:100]}", flush=True)
            del timed[name]

    def rate(run) -> float:
        return flops * calls_per_second(run, seconds) / 1e9

    return in_turns({name: functools.partial(rate, run) for name, run in timed.items()}, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="tokens x inputs x outputs, several separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of each product in each round")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    for text in arguments.shapes.split(","):
        shape = tuple(map(int, text.split("x")))
        timed = {}
        for dtype, product in TYPES:
            timed |= {(f"{dtype} -> {product}", form): run for form, run in ours(shape, dtype, product).items()}
        if importlib.util.find_spec("torch"):
            for dtype in ("float32", "bfloat16"):
                timed |= {(f"torch, {dtype}", form): run for form, run in torchs(shape, dtype).items()}
        print(f"\n{text}, GFLOP/s, median (least - most)", flush=True)
        found = rates(timed, 2 * int(np.prod(shape)), arguments.rounds, arguments.seconds)
        forms = [*FORMS, "ours"]
        print(table_header(["factors -> product", *forms]))
        for row in dict.fromkeys(name for name, _ in found):
            cells = [spread(found[row, form]) if (row, form) in found else "" for form in forms]
            print(table_row([row, *cells]), flush=True)


if __name__ == "__main__":
    main()

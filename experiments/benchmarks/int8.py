"""Dev scores and seconds of a fine-tuned run with int8, bfloat16 and float32 products in dense layers.

Weights have a scale per output and activations a scale per token, both from the largest value. Products sum in int32.
Attention's products are not quantized. Kernels are quantized in every batch, as in a first version.

Command:  python -m experiments.benchmarks.int8 runs/mrpc runs/ner
          Finished runs of bertjax; their data must be in the original place.
Hardware: 2 CPU cores, minutes
Score:    see RESULTS.md
"""

import argparse
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.distributed.mesh import compute_for, make_mesh, replicated
from bertjax.inference import tasks
from bertjax.inference.predictor import Predictor
from bertjax.interop import pretrained
from bertjax.nn.ops import matmul
from experiments.benchmarks.timing import spread

ROUNDS = 3


def quantized(x, axis: int):
    """Returns int8 numbers, and the scales along the other axes for the inverse."""
    scale = jnp.maximum(jnp.abs(x).max(axis, keepdims=True), 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def project(x, kernel, compute, outputs_first: bool = False):
    """Replaces `nn.ops.matmul.project`."""
    axis = kernel.ndim - 1 if outputs_first else 0
    (x, of_rows), (kernel, of_columns) = quantized(x, -1), quantized(kernel, axis)
    product = jnp.tensordot(x, kernel, (-1, axis), preferred_element_type=jnp.int32)
    of_columns = of_columns.squeeze(axis)
    return product * of_rows.reshape(*x.shape[:-1], *[1] * of_columns.ndim) * of_columns


def measured(dataset, source, dtype: str):
    """Returns the scores on the dev sets, the seconds of each round, and all decisions."""
    output_layer, mesh = dataset.head, make_mesh(source.settings, jax.devices()[:1])
    compute = compute_for("float32" if dtype == "int8" else dtype)
    model = output_layer.model(source.config, source.head, compute=compute)
    predictor = Predictor(model, output_layer.pooled, mesh, source.settings.batch_size, output_layer.can_pack(model))
    params, seconds = jax.device_put(source.params, replicated(mesh)), []
    with mock.patch("bertjax.nn.attention.project", project if dtype == "int8" else matmul.project):
        for _ in range(1 + ROUNDS):
            began = time.perf_counter()
            found = [predictor(params, split.examples) for split in dataset.dev]
            seconds.append(time.perf_counter() - began)
    scores = {}
    for split, logits in zip(dataset.dev, found):
        scores |= split.score(split.decode(logits))
    decisions = [logits.argmax(-1).reshape(-1) for each in found for logits in each]
    return scores, seconds[1:], np.concatenate(decisions)  # the first round compiles


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", nargs="+")
    workdirs = parser.parse_args().workdirs
    print("| run | products | scores | s, median (least - most) | decisions unlike float32 |\n|---|---|---|---|---|")
    for workdir in workdirs:
        source, exact = pretrained.read_with_tokenizer(workdir), None
        dataset = tasks.get(source.settings.task).load(source.settings, source.tokenizer)
        for dtype in ("float32", "bfloat16", "int8"):
            scores, seconds, decisions = measured(dataset, source, dtype)
            exact = decisions if exact is None else exact
            said = ", ".join(f"{name} {100 * value:.2f}" for name, value in scores.items())
            unlike = f"{(decisions != exact).sum()} of {len(exact)}"
            print(f"| {workdir} | {dtype} | {said} | {spread(seconds, 1)} | {unlike} |", flush=True)


if __name__ == "__main__":
    main()

"""Compares the choices for GPUs by the compiler: bertjax's kernels, XLA's operations or cuDNN; XLA's flags.

Attention and LayerNorm, forward and backward, of BERT-base on 16,384 tokens, and the training step of a small BERT on a
machine with eight GPUs: temporary memory, the bytes that kernels read and write, and the lower bound of the time from
`bertjax.planner.roofline`. No kernel is faster than the bound. Only a GPU can show the real time.

Command:  python -m experiments.benchmarks.gpu_choices attention norm flags
Needs:    pip install -e '.[aot-cuda]'; no GPU
Hardware: 2 CPU cores, ten minutes
Score:    see RESULTS.md
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from bertjax.config.model_config import BertConfig, Compute
from bertjax.distributed.mesh import make_mesh
from bertjax.distributed.topology import accelerator
from bertjax.launch.start import kind_of
from bertjax.nn.kernels.gpu_attention import gpu_attention
from bertjax.nn.norm import LayerNorm, Normalize
from bertjax.nn.ops.plain_attention import plain_attention
from bertjax.planner.hlo import KINDS, HloModule, instruction_of
from bertjax.planner.roofline import COLLECTIVES, roofline
from bertjax.training.step import Program, abstract_hyperparameters

CHIPS = ("a100-80", "h100", "l4")
TOKENS, HEADS, SIZE, RATE = 16_384, 12, 64, 0.1
LENGTHS = (128, 512, 1024, 8192)
HIDDEN = HEADS * SIZE
MIB = 1 << 20

# Options of XLA_FLAGS that differ from the defaults.
FLAGS = {
    "as it is": {},
    "latency hiding off": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "latency hiding on": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "Triton for products off": {"xla_gpu_enable_triton_gemm": False},
    "combining all-reduces off": {"xla_gpu_all_reduce_combine_threshold_bytes": 0},
    "combining all-gathers off": {"xla_gpu_all_gather_combine_threshold_bytes": 0},
    "combining reduce-scatters off": {"xla_gpu_reduce_scatter_combine_threshold_bytes": 0},
    "all-gathers of 1 GiB combined": {"xla_gpu_all_gather_combine_threshold_bytes": 1 << 30},
    "no command buffers": {"xla_gpu_enable_command_buffer": ""},
    "all-reduces pipelined": {"xla_gpu_enable_pipelined_all_reduce": True},
}


def fused(projected, segments, words, chip: str):
    return gpu_attention(projected, segments, jax.random.wrap_key_data(words, impl="threefry2x32"), RATE, chip=chip)


def fused_without_dropout(projected, segments, words, chip: str):
    return gpu_attention(projected, segments, chip=chip)


def by_xla(projected, segments, words, chip: str):
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    return plain_attention(projected, segments, keys, RATE, Compute("bfloat16", "bfloat16", chip=""))


def by_xla_without_dropout(projected, segments, words, chip: str):
    return plain_attention(projected, segments, None, 0.0, Compute("bfloat16", "bfloat16", chip=""))


def by_cudnn(projected, segments, words, chip: str):
    """Computes attention by cuDNN, without dropout, with one segment per row and padding at the end."""
    lengths = (segments > 0).sum(1).astype(jnp.int32)
    own = jnp.moveaxis(projected, 2, 0)
    how = dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation="cudnn")
    return jax.nn.dot_product_attention(*own, **how).reshape(*projected.shape[:2], -1)


WAYS = {
    "kernel": fused,
    "XLA": by_xla,
    "kernel, no dropout": fused_without_dropout,
    "XLA, no dropout": by_xla_without_dropout,
    "cuDNN, no dropout": by_cudnn,
}


def measured(function, arrays, argnums, target, least_flops: int = 0) -> list[str]:
    """Returns MiB of temporaries, MiB read and written, and the lower bound of ms, of a function and its gradient.

    Args:
      least_flops: FLOPs of the matrix products in calls that are opaque to the compiler.
    """

    def loss(*arrays):
        return function(*arrays).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, argnums=argnums)).lower(*arrays)
    compiled = lowered.compile(compiler_options=target.compiler_options)
    module = HloModule(compiled.as_text())
    mesh = jax.sharding.Mesh(np.array(target.devices()[:1]), ("data",))
    works = roofline(module, target, mesh, (), RATE).works
    seconds = max(sum(work.seconds for work in works), least_flops / target.generation.peak_flops)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return [f"{temporaries / MIB:,.0f}", f"{sum(w.bytes for w in works) / MIB:,.0f}", f"{1e3 * seconds:.2f}"]


def attention() -> list[list[str]]:
    rows = [["chip", "length", "by", "temporaries, MiB", "read and written, MiB", "at least, ms"]]
    for chip in CHIPS:
        target = accelerator(chip)
        on_device = SingleDeviceSharding(target.devices()[0])
        for length in LENGTHS:
            shapes = ((TOKENS // length, length, 3, HEADS, SIZE), jnp.bfloat16), ((TOKENS // length, length), jnp.int32)
            shapes += (((TOKENS // length, 2), jnp.uint32),)
            arrays = [jax.ShapeDtypeStruct(*shape, sharding=on_device) for shape in shapes]
            for name, way in WAYS.items():

                def run(projected, segments, words, way=way, kind=target.generation.kind):
                    return way(projected, segments, words, kind)

                # Forward: two products. Backward: five products, the scores again and four gradients.
                flops = 7 * 2 * TOKENS * length * HIDDEN if "cuDNN" in name else 0
                row = [chip, f"{length:,}", name]
                try:
                    row += measured(run, arrays, (0,), target, flops)
                except Exception as error:
                    row += [type(error).__name__, str(error).splitlines()[0][:60], ""]
                print(" | ".join(row), file=sys.stderr, flush=True)
                rows.append(row)
    return rows


def norm() -> list[list[str]]:
    rows = [["chip", "LayerNorm of a sum, by", "temporaries, MiB", "read and written, MiB", "at least, ms"]]
    config = BertConfig(hidden_size=HIDDEN, num_attention_heads=HEADS)
    for chip in CHIPS:
        target = accelerator(chip)
        on_device = SingleDeviceSharding(target.devices()[0])
        wide, narrow = (TOKENS // 512, 512, HIDDEN), (HIDDEN,)
        shapes = (wide, jnp.bfloat16), (wide, jnp.bfloat16), *((narrow, jnp.float32),) * 3
        shapes += (((TOKENS // 512, 2), jnp.uint32),)
        arrays = [jax.ShapeDtypeStruct(*shape, sharding=on_device) for shape in shapes]
        for name, kind in (("kernel", target.generation.kind), ("XLA", "")):
            module = Normalize(LayerNorm(config.layer_norm_eps), HIDDEN, Compute("bfloat16", "bfloat16", chip=kind))

            def run(x, update, update_bias, scale, bias, words, module=module):
                keys = jax.random.wrap_key_data(words, impl="threefry2x32")
                params = {"params": {"scale": scale, "bias": bias}}
                return module.apply(params, x, update, update_bias, keys, config.hidden_dropout_prob, method="of_sum")

            rows.append([chip, name, *measured(run, arrays, (0, 1, 2, 3, 4), target)])
    return rows


def flags() -> list[list[str]]:
    """Returns a table of the training step of `small:tiny`: the counts of its program with each option."""
    from experiments import small

    header = ["XLA's flags", "collectives", "begun early", "kernels meanwhile", "kernels", "temporaries, MiB"]
    rows, target, config = [[*header, "at least, ms"]], accelerator("h100-8"), small.get_config("tiny")
    config.model.vocab_size = 2048
    mesh = make_mesh(config, target.devices())
    task, (planned, *_) = kind_of(config).planning.open(config, mesh, ())
    program = Program(task, config, mesh)
    given = program.state, planned.batch, abstract_hyperparameters(config, mesh)
    lowered = program.step_of(*task.loss_and_config(0)).lower(*given)
    for name, options in FLAGS.items():
        compiled = lowered.compile(compiler_options={**target.compiler_options, **options})
        module = HloModule(compiled.as_text())
        found = module.collectives(dict(mesh.shape))
        bound = roofline(module, target, mesh, found, RATE)
        begun, meanwhile = overlaps(module)
        kernels = sum(work.calls for work in bound.works if work.category != COLLECTIVES)
        row = [name, f"{sum(each.count for each in found)}", f"{begun}", f"{meanwhile}", f"{kernels:,}"]
        rows.append([*row, f"{compiled.memory_analysis().temp_size_in_bytes / MIB:,.0f}", f"{1e3 * bound.seconds:.3f}"])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def overlaps(module: HloModule) -> tuple[int, int]:
    """Returns the number of asynchronous collectives, and the number of kernels that run during them."""
    begun, meanwhile, running = 0, 0, 0
    for _, line, _ in module.executed():
        instruction = instruction_of(line)
        opcode = instruction.opcode if instruction else ""
        if opcode.startswith(KINDS) and opcode.endswith("-start"):
            begun, running = begun + 1, running + 1
        elif opcode.startswith(KINDS) and opcode.endswith("-done"):
            running -= 1
        elif opcode in ("fusion", "custom-call") and running:
            meanwhile += 1
    return begun, meanwhile


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    parts = {"attention": attention, "norm": norm, "flags": flags}
    for name in sys.argv[1:] or parts:
        header, *rows = parts[name]()
        print(*(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]), "", sep="\n")


if __name__ == "__main__":
    main()

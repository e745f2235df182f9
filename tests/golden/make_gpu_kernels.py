"""Writes tests/golden/gpu_kernels.json, the registers of the GPU kernels: python tests/golden/make_gpu_kernels.py

Compiles them to PTX for a GPU of each architecture, and that with ptxas: a few minutes on two cores. Needs
jax[cuda12]. Look at the difference before you commit it: a kernel of more registers runs on fewer threads at a time.
"""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
PATH = ROOT / "tests/golden/gpu_kernels.json"
GPUS = ("a100-40", "l4", "h100")  # sm_80, sm_89, sm_90
ROWS, LENGTH = 2, 512
# Tests compile without these optimizations, users compile with them.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def bert(chip: str):
    """The kernels of BERT-large: heads of 64 with dropout, the norm of a sum, GELU."""
    from bertjax.nn.kernels.gpu_activation import gpu_activate
    from bertjax.nn.kernels.gpu_attention import gpu_attention
    from bertjax.nn.kernels.gpu_norm import gpu_add_norm

    def loss(projected, x, product, scale, bias, segments, words):
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        update = gpu_attention(projected, segments, keys, 0.1, chip=chip)
        x = gpu_add_norm(x, update, scale, scale, scale, keys, 0.1, 1e-12, chip)
        return x.sum() + gpu_activate(product, bias, "gelu", chip).sum()

    return loss, LENGTH, (3, 16, 64), (4096,)


def gpt(chip: str):
    """The kernels of GPT-2: causal attention, a norm before the sum, tanh-GELU."""
    from bertjax.nn.kernels.gpu_activation import gpu_activate
    from bertjax.nn.kernels.gpu_attention import gpu_attention
    from bertjax.nn.kernels.gpu_norm import gpu_sum_and_norm

    def loss(projected, x, product, scale, bias, segments, words):
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        update = gpu_attention(projected, segments, keys, 0.1, chip=chip, causal=True)
        total, x = gpu_sum_and_norm(x, update, scale, scale, scale, keys, 0.1, 1e-5, chip)
        return total.sum() + x.sum() + gpu_activate(product, bias, "gelu_new", chip).sum()

    return loss, LENGTH, (3, 12, 64), (3072,)


def modern(chip: str):
    """The kernels of ModernBERT for long rows: heads of 64 with and without a window, a norm without bias, a gated
    GELU.
    """
    from bertjax.nn.kernels.gpu_activation import gpu_activate
    from bertjax.nn.kernels.gpu_attention import gpu_attention
    from bertjax.nn.kernels.gpu_norm import gpu_sum_and_norm

    def loss(projected, x, product, scale, bias, segments, words):
        attended = gpu_attention(projected, segments, chip=chip) + gpu_attention(
            projected, segments, chip=chip, window=64
        )
        total, x = gpu_sum_and_norm(x, attended, None, scale, None, None, 0.0, 1e-5, chip)
        return total.sum() + x.sum() + gpu_activate(product, None, "gelu", chip).sum()

    return loss, 8192, (3, 12, 64), (2, 1152)


def wide(chip: str):
    """The widest kernels: heads of 128 with a window, dropout and causal attention; norms of 2,048; a gated SiLU."""
    from bertjax.nn.kernels.gpu_activation import gpu_activate
    from bertjax.nn.kernels.gpu_attention import gpu_attention
    from bertjax.nn.kernels.gpu_norm import WIDEST, gpu_add_norm, gpu_norm

    def loss(projected, x, product, scale, bias, segments, words):
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        for form in ({"window": 64}, {}, {"causal": True}):
            x = gpu_norm(x + gpu_attention(projected, segments, keys, 0.1, chip=chip, **form), scale, None, 1e-5, chip)
        x = gpu_add_norm(x, x, scale, scale, scale, keys, 0.1, 1e-12, chip)
        return x.sum() + gpu_activate(product, None, "silu", chip).sum()

    return loss, LENGTH, (3, WIDEST // 128, 128), (2, 1152)


def measure(gpu: str, program) -> dict[str, dict[str, int]]:
    """Returns registers and spilt bytes of each kernel of a program and of its gradient."""
    from bertjax.distributed.topology import accelerator

    target = accelerator(gpu)
    device = target.devices()[0]

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    loss, length, projected, product = program(device.device_kind)
    _, heads, size = projected
    shapes = (
        array(ROWS, length, *projected), array(ROWS, length, heads * size), array(ROWS, length, *product),
        array(heads * size, dtype=jnp.float32), array(*product, dtype=jnp.float32),
        array(ROWS, length, dtype=jnp.int32), array(ROWS, 2, dtype=jnp.uint32),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options = {**target.compiler_options, **OPTIMIZED, "xla_dump_to": folder}
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))).lower(*shapes).compile(compiler_options=options)
        texts = [path.read_text() for path in sorted(pathlib.Path(folder).glob("*.ptx"))]
    kernel_texts = (text for text in texts if ".entry gpu_" in text)
    return {name: counts for text in kernel_texts for name, counts in assemble(text)}


def assemble(ptx: str) -> list[tuple[str, dict[str, int]]]:
    """Returns the statistics of ptxas for each kernel of a text."""
    (package,) = importlib.util.find_spec("nvidia.cuda_nvcc").submodule_search_locations
    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    command = [f"{package}/bin/ptxas", f"-arch={architecture}", "-v", "-o", "/dev/null", "/dev/stdin"]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    statistics = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", report, re.DOTALL
    )
    return [(name, {"registers": int(registers), "spilt": int(spilt)}) for name, spilt, registers in statistics]


PROGRAMS = {"bert": bert, "gpt": gpt, "modern": modern, "wide": wide}


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    registers = {f"{gpu} {name}": measure(gpu, program) for gpu in GPUS for name, program in PROGRAMS.items()}
    assert not [counts for kernels in registers.values() for counts in kernels.values() if counts["spilt"]], registers
    rows = (
        f' "{name}": {json.dumps({k: c["registers"] for k, c in kernels.items()})}'
        for name, kernels in registers.items()
    )
    PATH.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()

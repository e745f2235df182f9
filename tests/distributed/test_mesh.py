"""Meshes: matching and mismatched device counts, and shardings that follow the rules."""

import io
import os
import platform
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from bertjax.common.errors import UserError
from bertjax.config.model_config import Compute
from bertjax.distributed import topology
from bertjax.distributed.mesh import _arrange, compute_on, local_rows, make_mesh, put_batch, replicated, split_over_data
from bertjax.distributed.topology import peak_flops
from bertjax.training.step import Program
from tests.conftest import pretraining_task, tiny_config


def config_with(**mesh):
    config = tiny_config("unused")
    config.mesh.update(mesh)
    return config


def test_minus_one_takes_the_remaining_devices():
    assert make_mesh(config_with()).shape == {"data": 8, "fsdp": 1, "tensor": 1}
    assert make_mesh(config_with(data=2, fsdp=-1, tensor=2)).shape == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize("mesh, fields, message", [
    (dict(data=3), {}, r"config.mesh = .*'data': 3.*the product must be 8, the number of devices"),
    (dict(data=-1, fsdp=3), {}, "the product must be 8, the number of devices"),
    ({}, dict(batch_size=12), r"config.batch_size = 12: .*multiple of the 8 devices"),
    ({}, dict(batch_size=16, microbatches=4), r"each of the 4 microbatches must be a multiple of the 8 devices"),
    (dict(data=1, tensor=8), {}, r"config.model.num_attention_heads = 2: must be a multiple of the 8 devices"),
])  # fmt: skip
def test_meshes_that_do_not_match_the_devices_are_refused(mesh, fields, message):
    config = config_with(**mesh)
    config.update(fields)
    with pytest.raises(UserError, match=message):
        make_mesh(config)


@pytest.mark.parametrize("sizes", [dict(data=8), dict(data=2, fsdp=2, tensor=2), dict(data=4, fsdp=2)])
def test_every_matrix_of_the_state_is_split_over_all_devices(sizes):
    """Params and both moments are sharded at rest; biases and LayerNorm, a thousandth of the state, are not."""
    config = config_with(**sizes)
    config.model.num_hidden_layers = 2  # which "data" splits
    task = pretraining_task(config, make_mesh(config), None)
    shares = {
        jax.tree_util.keystr(path): leaf.size / np.prod(leaf.sharding.shard_shape(leaf.shape))
        for path, leaf in jax.tree.leaves_with_path(Program(task, config, task.mesh).state)
        if getattr(path[-1], "key", None) in ("kernel", "embedding") and leaf.size >= 1000
    }
    layers = [share for name, share in shares.items() if "layers" in name]
    assert len(layers) == 3 * 4 and set(layers) == {8}, shares
    assert min(shares.values()) >= 8 / sizes.get("tensor", 1)  # "tensor" splits neither positions nor the pooler


@pytest.mark.parametrize(
    "axes, parts", [((), ("data", None)), (("layers", "embed"), (None, "data"))], ids=["not named", "named"]
)
def test_matrices_are_split_with_or_without_logical_axis_names(axes, parts):
    """The head of a user may be a plain `nn.Dense`."""
    mesh = make_mesh(config_with(data=8))
    split = split_over_data(replicated(mesh), PartitionSpec(*axes), (16, 32))
    assert split.spec == PartitionSpec(*parts)


def test_devices_of_a_slice_are_neighbours_along_data():
    """Eight devices in two slices: all axes except data stay within one slice."""
    chip = dict(platform="tpu", device_kind="TPU v5 lite", core_on_chip=0)
    devices = [
        types.SimpleNamespace(id=n, process_index=n // 2, slice_index=n % 2, coords=(n // 2 % 2, n // 4, 0), **chip)
        for n in range(8)
    ]
    slices = np.vectorize(lambda device: device.slice_index)(_arrange((4, 2, 1), devices))
    assert (slices[:2] == slices[0, 0]).all() and (slices[2:] == 1 - slices[0, 0]).all()
    with pytest.raises(UserError, match=r"config.mesh.data = 1: must be a multiple of the 2 slices"):
        _arrange((1, 8, 1), devices)
    for device in devices:
        device.platform = "gpu"  # the slices are hosts, which fsdp may connect
    assert _arrange((1, 8, 1), devices).shape == (1, 8, 1)


def test_batches_are_split_by_rows():
    mesh = make_mesh(config_with(data=4, fsdp=2))
    rows = np.arange(16 * 3).reshape(16, 3)
    array = put_batch({"x": rows}, mesh)["x"]
    assert (np.asarray(array) == rows).all()
    assert sorted(s.data.shape for s in array.addressable_shards) == [(2, 3)] * 8
    assert local_rows(mesh, 16).tolist() == list(range(16))


def test_compute_settings_depend_on_the_chip(monkeypatch):
    def compute(platform, chip, attention="auto", dtype="auto", remat="none", unroll="auto", kernels="auto", heads=12):
        config = config_with()
        config.kernels = kernels
        config.model.update(hidden_size=768, num_attention_heads=heads)
        config.dtype, config.model.attention, config.remat, config.unroll = dtype, attention, remat, unroll
        device = types.SimpleNamespace(platform=platform, device_kind=chip)
        return compute_on(types.SimpleNamespace(devices=np.array([device])), config)

    assert compute("cpu", "cpu") == Compute("float32", "float32", "none", True, "cpu")
    assert compute("cpu", "cpu", dtype="bfloat16") == Compute("float32", "bfloat16", "none", True, "cpu")
    monkeypatch.setattr("bertjax.distributed.mesh.cpu_dtype", lambda: "bfloat16")
    assert compute("cpu", "cpu") == Compute("float32", "bfloat16", "none", True, "cpu")
    assert compute("cpu", "cpu", dtype="float32") == Compute("float32", "float32", "none", True, "cpu")
    assert compute("tpu", "TPU v4") == Compute("bfloat16", "bfloat16", "none", False, "TPU v4")
    assert not compute("cpu", "cpu", remat="full").unroll  # unrolling would reduce the memory savings
    assert compute("tpu", "TPU v4", unroll="yes").unroll and not compute("cpu", "cpu", unroll="no").unroll
    assert compute("gpu", "NVIDIA H100", dtype="float32").dtype == "float32"
    assert compute("gpu", "NVIDIA H100", kernels="no").chip == compute("tpu", "TPU v4", kernels="no").chip == ""
    assert compute("cpu", "cpu", kernels="no").chip == "cpu"  # the tiled path for CPUs uses no kernels
    assert compute("gpu", "NVIDIA H100", attention="fused").chip == "NVIDIA H100"
    for chip, dtype in (("NVIDIA H100", "float32"), ("Tesla T4", "bfloat16")):
        with pytest.raises(UserError, match=f"'fused': {chip} has no kernel for {dtype}; set auto"):
            compute("gpu", chip, attention="fused", dtype=dtype)
    with pytest.raises(UserError, match="the kernel for GPUs supports head sizes 16, 32, 64, 128, not 96; set auto"):
        compute("gpu", "NVIDIA H100", attention="fused", heads=8)


@pytest.mark.parametrize("flags, dtype", [
    ("fpu avx512f avx512_bf16 avx512_vnni", "bfloat16"),
    ("fpu avx512f amx_bf16 amx_tile amx_int8", "bfloat16"),
    ("fpu avx512f avx512_vnni amx_int8", "float32"),
])  # fmt: skip
def test_cpu_dtype_follows_the_cpu_flags(monkeypatch, flags, dtype):
    content = f"processor\t: 0\nmodel name\t: a bf16 avx512_bf16\nflags\t\t: {flags}\nbugs\t\t: amx_bf16\n"
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(content))
    assert topology.cpu_dtype() == dtype


def test_peak_flops_are_known_by_kind():
    peaks = {"TPU v5 lite": 197e12, "TPU v5p": 459e12, "NVIDIA H200": 989e12, "cpu": None}
    assert {kind: peak_flops(types.SimpleNamespace(device_kind=kind)) for kind in peaks} == peaks


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc, and sets options of glibc")
def test_cpu_devices_use_all_cores_and_free_memory():
    """Runs in a separate process, because devices are configured once.

    The numbers of resident pages show whether memory is freed. Each call of `step` needs 16 MB; the next calls are
    dispatched before the first call has finished.
    """
    program = """
import pathlib, re, resource
import jax, jax.numpy as jnp, numpy as np
from bertjax.config import pretraining_config
from bertjax.distributed.mesh import use_cpu_cores

config = pretraining_config()
config.mesh.fsdp = 2
use_cpu_cores(config)
step = jax.jit(lambda x: jnp.sort(jnp.outer(x[:1024], x), axis=1).mean(0))
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(100 << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
step(jnp.ones(4096)).block_until_ready()
first = peak()
jax.block_until_ready([step(jnp.full(4096, float(n))) for n in range(4)])
print(len(jax.devices()), peak() - first, [pages() for _ in range(4)][-1])
"""
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    devices, memory, pages = map(int, out.stdout.split())
    assert devices == 2
    assert pages < 100  # of 25,600 small arrays
    assert memory < 45 << 10  # KiB; up to 34 MiB were measured, and 62 MiB with asynchronous dispatch

"""The shipped configs and the bertjax kernels, compiled for GPUs by XLA. No GPU is needed."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from bertjax.distributed.gpus import GPUS
from bertjax.distributed.topology import accelerator
from bertjax.planner import summary
from bertjax.planner.plan import plan
from bertjax.planner.roofline import ATTENTION, COLLECTIVES, PRODUCTS
from tests.golden import make_gpu_kernels, make_hbm
from tests.planner.test_plan import GOLDEN, matrix_count, total_bytes
from tests.processes import ROOT, run

COMPILED_AGAIN = "small:tiny h100-8"
pytestmark = pytest.mark.gpu_aot


@pytest.fixture(scope="module")
def data_parallel():
    """The first stage of a stored measurement, on a machine of 8 GPUs."""
    config = make_hbm.load(COMPILED_AGAIN)
    (result,) = plan(config, make_hbm.target(COMPILED_AGAIN), [0])
    return config, result


def test_weights_and_gradients_cross_the_links_once_a_step(data_parallel):
    config, result = data_parallel
    assert not [c for c in result.collectives if c.in_loop], result.collectives
    gathered = [c for c in result.collectives if c.kind == "all-gather"]
    summed = [c for c in result.collectives if c.kind in ("reduce-scatter", "all-reduce")]
    assert {c.count for c in gathered} == {1} and [c.count for c in summed if c.kind == "reduce-scatter"] == [1]
    # In bfloat16, except the matrices of the heads; gradients in float32, with some scores.
    assert 2 * matrix_count(config) <= sum(c.bytes for c in gathered) < 2.1 * matrix_count(config)
    assert 4 * matrix_count(config) <= total_bytes(summed) < 4.2 * matrix_count(config)


def test_the_memory_equals_the_stored_measurement(data_parallel):
    """The tolerance is 5 %, as for TPUs."""
    measured, golden = make_hbm.row(COMPILED_AGAIN, data_parallel[1]), GOLDEN[COMPILED_AGAIN][0]
    for field in ("params_mib", "optimizer_mib", "hbm_used_mib"):
        assert math.isclose(measured[field], golden[field], rel_tol=0.05, abs_tol=1), (field, measured, golden)


def test_the_roofline_includes_all_products_of_the_step(data_parallel):
    _, result = data_parallel
    works = result.roofline.works
    flops = sum(work.flops for work in works)  # includes attention products that the backward pass computes again
    assert 0.9 * result.flops_per_step / 8 < flops < 1.6 * result.flops_per_step / 8
    kernel_calls = {work.name: work.calls for work in works if work.name.startswith("gpu_attention")}
    assert kernel_calls == dict.fromkeys(["gpu_attention_forward", "gpu_attention_keys", "gpu_attention_queries"], 2)
    shares = result.roofline.by_category()
    assert shares.keys() >= {PRODUCTS, ATTENTION, COLLECTIVES}
    assert 0 < result.estimated_mfu < 1
    table = summary.as_table([result], accelerator("h100-8"), price_per_chip_hour=2.0)
    assert table.startswith("h100-8: 8 GPUs") and "least step" in table and "all stages: at least" in table
    (row,) = json.loads(summary.as_json([result]))
    assert len(row["roofline"]) == len(works) and row["estimated_mfu"] is None
    assert row["most_mfu"] == result.estimated_mfu and row["least_step_seconds"] == result.roofline.seconds


@pytest.mark.parametrize("name", GPUS)
def test_xla_supports_every_gpu(name):
    target = accelerator(f"{name}-16", hosts=2)
    devices = target.devices()
    assert {device.device_kind for device in devices} == {GPUS[name].kind}
    assert [device.process_index for device in devices] == [0] * 8 + [1] * 8
    factor = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=SingleDeviceSharding(devices[0]))
    compiled = jax.jit(jnp.matmul).lower(factor, factor).compile(compiler_options=target.compiler_options)
    assert compiled.memory_analysis().output_size_in_bytes == 2 * 256 * 256


@pytest.mark.parametrize("program", make_gpu_kernels.PROGRAMS)
@pytest.mark.parametrize("gpu", make_gpu_kernels.GPUS)
def test_kernels_use_the_stored_numbers_of_registers(gpu, program):
    measured = make_gpu_kernels.measure(gpu, make_gpu_kernels.PROGRAMS[program])
    golden = json.loads(make_gpu_kernels.PATH.read_text())[f"{gpu} {program}"]
    assert measured.keys() == golden.keys()
    for name, counts in measured.items():
        assert counts["spilt"] == 0, name
        assert abs(counts["registers"] - golden[name]) <= 16, (name, counts)  # releases of ptxas differ a little


def test_mistakes_print_one_line():
    done = run("compile", "--config=experiments/base.py", "--topology=h100-4", "--config.mesh.data=3", cwd=ROOT)
    assert done.returncode == 1 and done.stdout == ""
    message = "the product must be 4, the number of devices; set an axis to -1"
    assert done.stderr == f"error: config.mesh = {dict(data=3, fsdp=1, tensor=1)}: {message}\n"

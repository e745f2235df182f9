"""The minimum time of a step, from a shortened XLA program for a GPU."""

import pathlib
import re
import types

import numpy as np
import pytest

from bertjax.distributed.topology import accelerator
from bertjax.nn.kernels.gpu_attention import work_of
from bertjax.planner.hlo import Collective, HloModule
from bertjax.planner.roofline import ATTENTION, COLLECTIVES, ELEMENTS, OPTIMIZER, PRODUCTS, Work, roofline

# Sixteen layers; each layer slices its weights from an array of all layers, and writes its output into another array.
TEXT = (pathlib.Path(__file__).parent / "layers.hlo").read_text()
MIB = 1 << 20


def mesh_of(hosts: int, **sizes):
    """Devices of two machines, with the attributes that the roofline reads."""
    count = int(np.prod(list(sizes.values())))
    devices = [types.SimpleNamespace(process_index=number // (count // hosts)) for number in range(count)]
    return types.SimpleNamespace(devices=np.array(devices).reshape(*sizes.values()), axis_names=tuple(sizes))


def works_of(text: str = TEXT, dropout: float = 0.0) -> dict[tuple[str, str], Work]:
    result = roofline(HloModule(text), accelerator("h100-1"), mesh_of(1, data=1), (), dropout)
    return {(work.category, work.name): work for work in result.works}


def test_a_loop_reads_and_writes_one_layer_per_iteration():
    works = works_of()
    fusions = works[ELEMENTS, "fusion"]
    assert fusions.calls == 32
    # The slice is read and written; the result of the product is read, and written into the array of all layers.
    assert fusions.bytes == 16 * (2 * MIB + 2 * 8 * MIB + 2 * 4)  # the index is read twice
    assert fusions.seconds == pytest.approx(fusions.bytes / 3352e9)


def test_products_take_the_maximum_of_compute_and_traffic_time():
    bfloat16, blas = 16 * 2 * 4096 * 512 * 1024, 2 * 64 * 256 * 128
    product = works_of()[PRODUCTS, "product"]
    assert product.calls == 17 and product.flops == bfloat16 + blas
    small = 4 * (64 * 256 + 256 * 128 + 64 * 128) / 3352e9  # bound by memory, without the workspace
    seconds_per_call = max(bfloat16 / 16 / 989e12, (4 + 1 + 8) * MIB / 3352e9)
    assert product.seconds == pytest.approx(16 * seconds_per_call + small)


def test_operations_outside_the_model_count_as_optimizer():
    work = works_of()[OPTIMIZER, "fusion"]
    assert (work.calls, work.bytes) == (1, 8e6)


@pytest.mark.parametrize(
    "name, pairs, products",
    [
        ("gpu_attention_forward", 512 * 512, 2),
        ("gpu_attention_keys", 512 * 512, 4),
        ("gpu_attention_queries_64", 512 * 129, 3),
        ("gpu_attention_keys_causal", 512 * 513 // 2, 4),
    ],
)
def test_custom_kernels_are_counted_by_flops(name, pairs, products):
    work = works_of(TEXT.replace("gpu_attention_forward", name))[ATTENTION, name]
    assert work.calls == 1 and work.flops == 2 * products * 64 * 2 * 4 * pairs
    without, dropout = (work_of(name, (2, 512, 3, 4, 64), rate).operations for rate in (0.0, 0.1))
    assert 8 * pairs <= without < dropout


def test_a_kernel_reads_its_inputs_and_writes_its_share():
    projected, context, log_sums = 2 * 2 * 512 * 3 * 4 * 64, 2 * 2 * 512 * 4 * 64, 4 * 2 * 4 * 512
    assert works_of()[ATTENTION, "gpu_attention_forward"].bytes == projected + context + log_sums
    operands = (
        "{bf16[2,512,3,4,64]{4,3,2,1,0}, bf16[2,512,3,4,64]{4,3,2,1,0}}, output_to_operand_aliasing={{}: (1, {})}"
    )
    text = re.sub(r"\(bf16\[2,512,4,64\].*?\) custom-call", "bf16[2,512,3,4,64]{4,3,2,1,0} custom-call", TEXT).replace(
        "{bf16[2,512,3,4,64]{4,3,2,1,0}}", operands
    )
    for name, share in (("gpu_attention_keys", 2 / 3), ("gpu_attention_queries", 1 / 3)):
        work = works_of(text.replace("gpu_attention_forward", name))[ATTENTION, name]
        assert work.bytes == pytest.approx(projected + share * projected)


def test_collectives_take_the_time_of_links_and_of_the_network():
    """8 GB, gathered by ring: each GPU receives the parts that it lacks."""

    def seconds(kind: str, axes: tuple[str, ...], mesh, hosts: int = 1) -> float:
        row = Collective(kind, axes, "f32", 8 * 10**9, 1, False)
        result = roofline(HloModule(TEXT), accelerator("h100-8", hosts=hosts), mesh, [row], 0.0)
        return result.by_category()[COLLECTIVES]

    one, two = mesh_of(1, data=2, fsdp=4), mesh_of(2, data=2, fsdp=4)
    assert seconds("all-gather", ("data", "fsdp"), one) == pytest.approx(7 / 8 * 8e9 / 450e9)
    assert seconds("all-reduce", ("fsdp",), one) == pytest.approx(2 * 3 / 4 * 8e9 / 450e9)
    assert seconds("all-gather", ("data",), two, 2) == pytest.approx(4e9 / 50e9)  # one GPU of each machine
    # Four GPUs of each machine: a network adapter carries a quarter of the other half.
    assert seconds("all-gather", ("data", "fsdp"), two, 2) == pytest.approx(max(6e9 / 450e9, 1e9 / 50e9))
    assert seconds("reduce-scatter", ("fsdp",), two, 2) == pytest.approx(6e9 / 450e9)  # within a machine
    # Each GPU has 8 GB and keeps an eighth; half comes from the other machine, with distinct parts for each GPU.
    assert seconds("all-to-all", ("data", "fsdp"), one) == pytest.approx(7 / 8 * 8e9 / 450e9)
    assert seconds("all-to-all", ("data", "fsdp"), two, 2) == pytest.approx(4e9 / 50e9)
    assert seconds("collective-permute", ("fsdp",), one) == pytest.approx(8e9 / 450e9)
    assert seconds("collective-permute", ("data",), two, 2) == pytest.approx(8e9 / 50e9)


def test_a_step_takes_as_long_as_its_kernels_or_its_collectives():
    row = Collective("all-gather", ("data",), "f32", 450 * 10**9, 1, False)
    mesh, target = mesh_of(1, data=2), accelerator("h100-2")
    alone = roofline(HloModule(TEXT), target, mesh, [], 0.0)
    assert alone.seconds == pytest.approx(sum(alone.by_category().values()))
    assert roofline(HloModule(TEXT), target, mesh, [row], 0.0).seconds == pytest.approx(0.5)

"""Parsing of compiled text: loops, transfers, and the notations of replica groups."""

import pathlib

import pytest

from bertjax.planner.hlo import Collective, HloModule

MESH = {"data": 2, "fsdp": 4, "tensor": 2}

TEXT = (pathlib.Path(__file__).parent / "loops.hlo").read_text()


def test_cycles_count_loop_bodies_by_trip_count():
    assert HloModule(TEXT).estimated_cycles() == 1000 + 12 * (100 + 3 * 10)
    estimates = [(estimate.operation, estimate.cycles, estimate.times) for estimate in HloModule(TEXT).estimates()]
    assert estimates == [("layers/mul", 10, 36), ("", 100, 12), ("", 1000, 1)]


def test_flops_include_fused_products_and_bytes_count_hbm():
    text = """
%product (param_0: bf16[32,16], param_1: bf16[16,8]) -> bf16[32,8] {
  %param_0 = bf16[32,16]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(1)
  %double = bf16[32,16]{1,0} add(%param_0, %param_0)
  ROOT %product.1 = bf16[32,8]{1,0} convolution(%double, %param_1), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[32,16], b: bf16[16,8]) -> bf16[32,8] {
  %a = bf16[32,16]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %both = (f32[32]{0:T(128)S(1)}, bf16[32,8]{1,0}) fusion(%a, %b), calls=%product, x={"estimated_cycles":"9"}
}
"""
    [estimate] = HloModule(text).estimates()
    assert estimate.flops == 2 * 32 * 16 * 8
    assert estimate.bytes == 2 * (32 * 16 + 32 * 8)  # the other arrays are on chip


def test_transfers_are_counted_once_with_axes_and_bytes():
    collectives = set(HloModule(TEXT).collectives(MESH))
    assert collectives == {
        # A transfer that starts before the loop and continues in the loop counts as one transfer.
        Collective("all-gather", ("fsdp",), "bf16", 32 * 8 * 2, 1, False),
        Collective("all-reduce", ("tensor",), "f32", 12 * (16 + 4) * 4, 12, True),
        Collective("reduce-scatter", ("data",), "f32", 2 * 10 * 4, 1, False),
        Collective("all-gather", ("data", "fsdp"), "bf16", 16 * 8 * 2, 1, False),
    }


def test_an_asynchronous_transfer_counts_the_result_only():
    groups = "replica_groups=[8,2]<=[16]"
    text = f"""
ENTRY %main (p: f32[8]) -> f32[8] {{
  %x = ((f32[64]), f32[64]) all-to-all-start(%p), channel_id=1, {groups}
  %y = (bf16[8,8], bf16[8,8]) collective-permute-start(%q), channel_id=2, source_target_pairs={{{{0,1}},{{1,0}}}}
  %z = (f32[8], f32[8], u32[]{{:S(2)}}, u32[]) collective-permute-start(%r), channel_id=3, \
source_target_pairs={{{{0,2}},{{2,0}}}}
  %s = (f32[5], f32[5]) all-reduce-start(%t, %u), channel_id=4, {groups}
}}
"""
    transfers = {
        collective.kind + " " + collective.axes[0]: collective.bytes for collective in HloModule(text).collectives(MESH)
    }
    assert transfers == {
        "all-to-all tensor": 4 * 64,
        "collective-permute tensor": 2 * 64,
        "collective-permute fsdp": 4 * 8,
        "all-reduce tensor": 4 * (5 + 5),
    }


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("{{0,1},{2,3}}", ("tensor",)),
        ("[1,16]<=[16]", ("data", "fsdp", "tensor")),
        ("[4,4]<=[2,4,2]T(0,2,1)", ("fsdp",)),
        ("mesh['a'=2,'b'=4,'c'=2] {'b','c'}", ("fsdp", "tensor")),
        ("mesh['a'=4,'b'=1,'c'=4], device_ids=([4,4]T(1,0)) {'a'}", ("fsdp", "tensor")),  # 0, 1, 2, 3
        ("{}", ("data", "fsdp", "tensor")),  # all
    ],
)
def test_replica_groups_give_the_mesh_axes(groups, axes):
    text = "ENTRY %main (p: f32[8]) -> f32[8] {\n  %x = f32[8] all-reduce(%p), replica_groups=" + groups + "\n}\n"
    (collective,) = HloModule(text).collectives(MESH)
    assert collective.axes == axes

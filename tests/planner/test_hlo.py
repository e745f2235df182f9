"""Reading compiled text: loops, transfers, and the notations for who takes part."""

import pytest

from bertjax.planner.hlo import Collective, HloModule

MESH = {"data": 2, "fsdp": 4, "tensor": 2}

TEXT = """HloModule jit_step, is_scheduled=true

%piece (param_0: bf16[4,8]) -> bf16[32,8] {
  %gather.1 = bf16[32,8]{1,0} all-gather(%param_0), channel_id=3, replica_groups={{0,2,4,6},{1,3,5,7},{8,10,12,14}}
}

%body.1 (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %inner = (s32[]) while(%x), condition=%condition.2, body=%body.2
  %dot.1 = f32[8] fusion(%carry), kind=kOutput, calls=%piece, backend_config={"estimated_cycles":"100","other":"7"}
  %sum.1 = (f32[16]{0}, f32[4]{0}) all-reduce(%a, %b), channel_id=4, replica_groups=[8,2]<=[16]
}

%condition.1 (carry: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body.2 (carry: (s32[])) -> (s32[]) {
  %mul = f32[8] multiply(%p, %p), backend_config={"estimated_cycles":"10"}, metadata={op_name="layers/mul"}
}

%condition.2 (carry: (s32[])) -> pred[] {
  %limit.2 = s32[] constant(3)
  ROOT %less.2 = pred[] compare(%i, %limit.2), direction=LT
}

ENTRY %main (param: f32[8]) -> f32[8] {
  %start = (bf16[4,8], bf16[32,8]) fusion(%param), kind=kCustom, calls=%piece
  %loop = (s32[], f32[8]) while(%init), condition=%condition.1, body=%body.1
  %scatter = f32[10]{0} reduce-scatter(%g), channel_id=5, replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_0'}
  %begin = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%w), channel_id=6, replica_groups=[2,8]<=[8,2]T(1,0)
  %alone = f32[8] all-reduce(%l), channel_id=7, replica_groups={{0},{1},{2}}
  ROOT %add = f32[8] add(%q, %r), backend_config={"estimated_cycles":"1000"}
}
"""


def test_cycles_count_a_loop_as_often_as_it_runs():
    assert HloModule(TEXT).estimated_cycles() == 1000 + 12 * (100 + 3 * 10)
    found = [(each.operation, each.cycles, each.times) for each in HloModule(TEXT).estimates()]
    assert found == [("layers/mul", 10, 36), ("", 100, 12), ("", 1000, 1)]


def test_flops_are_those_of_fused_products_and_bytes_those_of_hbm():
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
    [found] = HloModule(text).estimates()
    assert found.flops == 2 * 32 * 16 * 8
    assert found.bytes == 2 * (32 * 16 + 32 * 8)  # the others lie on chip


def test_transfers_are_counted_once_each_with_axes_and_bytes():
    found = set(HloModule(TEXT).collectives(MESH))
    assert found == {
        # Begun before the loop and carried on in it: one transfer.
        Collective("all-gather", ("fsdp",), "bf16", 32 * 8 * 2, 1, False),
        Collective("all-reduce", ("tensor",), "f32", 12 * (16 + 4) * 4, 12, True),
        Collective("reduce-scatter", ("data",), "f32", 2 * 10 * 4, 1, False),
        Collective("all-gather", ("data", "fsdp"), "bf16", 16 * 8 * 2, 1, False),
    }


def test_of_a_transfer_that_goes_on_the_result_counts_and_not_its_source():
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
    found = {each.kind + " " + each.axes[0]: each.bytes for each in HloModule(text).collectives(MESH)}
    assert found == {
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
def test_who_takes_part(groups, axes):
    text = "ENTRY %main (p: f32[8]) -> f32[8] {\n  %x = f32[8] all-reduce(%p), replica_groups=" + groups + "\n}\n"
    (found,) = HloModule(text).collectives(MESH)
    assert found.axes == axes

"""How long the kernels of a step take on a TPU."""

import pytest

from bertjax.config.model_config import BertConfig
from bertjax.distributed.topology import GENERATIONS
from bertjax.planner.hlo import HloModule, Kernel
from bertjax.planner.kernel_times import kernel_seconds

CONFIG = BertConfig(hidden_size=128, num_attention_heads=2)
NAMES = ("add_norm_forward", "add_norm_backward", "attention_forward", "attention_backward")
ALL_NAMES = (*NAMES, "flash_forward")
CALL = (
    "  %{name}.1 = (bf16[4,128,128]{{2,1,0:T(8,128)(2,1)}}, f32[4,2,1,128]{{3,2,1,0}}) custom-call(%a, %b), "
    'custom_call_target="tpu_custom_call", '
    "operand_layout_constraints={{u32[4,1,3]{{2,1,0}}, bf16[12,128,128]{{2,1,0}}}}, "
    'metadata={{op_name="jit(step)/{scope}/pallas_call" stack_frame_id=9}}\n'
)


def test_kernels_are_listed_with_traffic_and_call_count():
    call = CALL.format(name="attention_forward", scope="while/body/attention_forward")
    derived = CALL.format(name="transpose_jvp", scope="transpose(jvp(attention_backward))")
    module = HloModule(
        "%body.1 (carry: (s32[])) -> (s32[]) {\n" + call + "}\n\n"
        "%condition.1 (carry: (s32[])) -> pred[] {\n  %limit = s32[] constant(12)\n}\n\n"
        "ENTRY %main (a: f32[]) -> f32[] {\n  %loop = (s32[]) while(%x), condition=%condition.1, body=%body.1\n"
        + derived + "  %other = f32[8] custom-call(%a), custom_call_target=\"Sharding\"\n}\n"
    )  # fmt: skip
    size = 2 * 4 * 128 * 128 + 4 * 4 * 2 * 128 + 4 * 4 * 3 + 2 * 12 * 128 * 128
    assert sorted(module.kernels(), key=lambda kernel: kernel.name) == [
        Kernel("attention_backward", size, 1),
        Kernel("attention_forward", size, 12),
    ]


def seconds(*names: str, times: int = 1, bytes: int = 0, generation: str = "v5litepod", rows: int = 64) -> float:
    """Returns the seconds of these kernels. libtpu analyses all kernels once."""
    kernels = [Kernel(name, bytes, times * (name in names)) for name in ALL_NAMES]
    return kernel_seconds(kernels, GENERATIONS[generation], CONFIG, rows=rows, length=128)


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_kernel_takes_the_maximum_of_compute_and_traffic_time():
    one = seconds(*NAMES, times=2)
    # A sixth of the heads of BERT-base (twelve layers take about 4 ms), and the norms of a sixth of its width.
    assert 2 * 50e-6 < one < 2 * 500e-6
    assert 10e-6 < seconds("flash_forward") < 1e-3
    assert seconds(*NAMES, times=2, rows=128) == pytest.approx(2 * one)
    clock_of_v4 = GENERATIONS["v4"].clock
    assert seconds(*NAMES, times=2, generation="v4") == pytest.approx(  # two cores
        one / 2 * GENERATIONS["v5litepod"].clock / clock_of_v4
    )
    assert seconds("add_norm_forward", times=2, bytes=10**9) == pytest.approx(2 * 1e9 / 819e9)
    assert kernel_seconds([], GENERATIONS["v4"], CONFIG, rows=64, length=128) == 0

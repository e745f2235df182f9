"""Names of GPUs as compilation targets, and mistakes in the names."""

import pytest

from bertjax.common.errors import UserError
from bertjax.distributed.gpus import GPUS
from bertjax.distributed.topology import accelerator
from bertjax.nn.kernels import triton


def test_gpus_are_named_with_their_number():
    for name, chips, hosts in (("h100-8", 8, 1), ("a100-40-4", 4, 1), ("a100-40", 1, 1), ("h200-16", 16, 2)):
        target = accelerator(name, hosts=hosts)
        assert (target.platform, target.chips, target.hosts) == ("gpu", chips, hosts), name
    assert accelerator("a100-40-8").generation is GPUS["a100-40"]
    assert accelerator("h200-16", hosts=2).description == "h200-16: 16 GPUs in 2 machines"


def test_gpu_rates_equal_the_data_sheets():
    """Float32 TFLOP/s are two per lane and cycle; a B200 has an eighth of an HGX B200.

    An A100 has an equal number of integer lanes, which can work at the same time.
    """
    sheets = {"a100-40": 19.5, "a100-80": 19.5, "h100": 67, "h200": 67, "l4": 30.3, "l40s": 91.6, "b200": 600 / 8}
    for name, gpu in GPUS.items():
        assert gpu.vector_rate / 1e12 == pytest.approx(sheets[name] * 128 / gpu.lanes, rel=0.01), name
        assert gpu.peak_flops > 3 * gpu.vector_rate
        assert triton.is_supported(gpu.kind) == (name != "b200")  # docs/limits.md


def test_jax_takes_three_quarters_of_the_memory_unless_the_environment_sets_another_share(monkeypatch):
    gpu = GPUS["l4"]
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert gpu.hbm_bytes == 0.75 * gpu.memory_bytes
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    assert gpu.hbm_bytes == 0.95 * gpu.memory_bytes
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(UserError, match="XLA_PYTHON_CLIENT_MEM_FRACTION=most: must be a number"):
        print(gpu.hbm_bytes)


@pytest.mark.parametrize("name, flags, message", [
    ("h300-8", {}, "--topology=h300-8: unknown; choose one of v2-N, .*: a100-40-N, .*b200-N$"),
    ("h100-0", {}, "--topology=h100-0: unknown; choose h100-N"),
    ("h100-x", {}, "--topology=h100-x: unknown; choose h100-N"),
    ("h100-16", {}, "--topology=h100-16: a machine has at most 8 GPUs; add --hosts=M"),
    ("h100-32", {"hosts": 2}, "at most 8 GPUs"),
    ("h100-8", {"hosts": 3}, "--hosts=3: must divide the 8 GPUs of --topology=h100-8"),
    ("h100-8", {"hosts": 0}, "--hosts=0: "),
    ("h100-8", {"slices": 2}, "--slices=2: GPUs have no slices; set the number of machines with --hosts=M"),
    ("v4-8", {"hosts": 2}, "--hosts=2: only for GPUs"),
])  # fmt: skip
def test_a_mistake_in_a_gpu_name_raises_one_line(name, flags, message):
    with pytest.raises(UserError, match=message):
        accelerator(name, **flags)


def test_a_missing_plugin_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"jax\[cuda12\] is not installed: pip install 'bertjax\[aot-cuda\]'"):
        accelerator("h100-8").devices()

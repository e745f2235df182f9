"""Folders with weights in PyTorch's format are read like safetensors; files with code are refused in one line."""

import os
import pickle
import shutil

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.interop import conversion, pretrained
from tests.interop.test_golden import GOLDEN, same

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.extra_packages


@pytest.fixture
def folder(tmp_path):
    """tests/golden/bert without its weights."""
    return tmp_path / shutil.copytree(GOLDEN, tmp_path / "bert", ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.fixture(scope="module")
def state():
    return safetensors.load_file(GOLDEN / "model.safetensors")


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_complete_files_are_read_and_converted(folder, state, is_zip, tmp_path):
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    read = pretrained.read_pretrained(folder)
    assert same(read.params, pretrained.read_pretrained(GOLDEN).params) and read.tokenizer is not None
    conversion.convert(folder, tmp_path / "written", "huggingface")
    assert (tmp_path / "written/model.safetensors").read_bytes() == (GOLDEN / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_become_float32(folder, state, dtype):
    rounded = {name: torch.nn.Parameter(tensor.to(getattr(torch, dtype))) for name, tensor in state.items()}
    torch.save(rounded, folder / "pytorch_model.bin")
    table = pretrained.read_pretrained(folder).params["bert"]["embeddings"]["position"]["embedding"]
    expected = rounded["bert.embeddings.position_embeddings.weight"].detach().float().numpy()
    assert table.dtype == np.float32 and (table == expected).all()


def test_safetensors_are_preferred_to_pickles(folder):
    (folder / "pytorch_model.bin").write_bytes(b"nonsense")
    shutil.copy(GOLDEN / "model.safetensors", folder)
    assert same(pretrained.read_pretrained(folder).params, pretrained.read_pretrained(GOLDEN).params)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))], ids=["zip", "pickle"])
def test_code_in_a_pickle_is_not_run(folder, save, tmp_path):
    save({"bert.pooler.dense.bias": Evil(str(tmp_path / "run"))}, folder / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"pytorch_model.bin: damaged, or has other objects than tensors, which could run"
    ) as error:
        pretrained.read_pretrained(folder)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: {"state_dict": state}, r"'state_dict' is not a tensor; save only state_dict\(\) of the model"),
        (lambda state: list(state.values()), r"'list' is not a tensor"),
        (
            lambda state: {name: x.to_sparse() for name, x in state.items()},
            "quantized, sparse or meta tensor",
        ),
        (lambda state: {name: x.to("meta") for name, x in state.items()}, "quantized, sparse or meta tensor"),
        (
            lambda state: {name: x.to(torch.int8) for name, x in state.items()},
            "has dtype int8; expected floats, not quantized weights",
        ),
        (lambda state: dict(list(state.items())[1:]), "is missing; expected the tensors of a BERT"),
    ],
)
def test_unsupported_content_is_named(folder, state, change, message):
    torch.save(change(state), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=message):
        pretrained.read_pretrained(folder)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_a_damaged_file_raises_one_line(folder, state, is_zip):
    path = folder / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=is_zip)
    whole = path.read_bytes()
    for size in (0, 1, 100, 3000, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"pytorch_model.bin: damaged") as error:
            pretrained.read_pretrained(folder)
        assert "\n" not in str(error.value) and "weights_only" not in str(error.value)

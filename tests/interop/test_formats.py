"""Weights of Hugging Face folders: shards, dtypes, and quantized weights, which are refused by name."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from bertjax.common.errors import UserError
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.models import quantization
from tests.interop.test_golden import GOLDEN, edit, same

TENSORS = safetensors.numpy.load_file(GOLDEN / huggingface.WEIGHTS)
INDEX = f"{huggingface.WEIGHTS}.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    """tests/golden/bert without its weights."""
    return tmp_path / shutil.copytree(GOLDEN, tmp_path / "bert", ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.fixture
def sharded(folder):
    """tests/golden/bert with two shards."""
    names = {name: (FIRST, SECOND)[number % 2] for number, name in enumerate(TENSORS)}
    for shard in (FIRST, SECOND):
        safetensors.numpy.save_file({name: x for name, x in TENSORS.items() if names[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def refusal(folder) -> str:
    """Returns the error message of reading a folder, which is one line."""
    with pytest.raises(UserError) as error:
        pretrained.read_pretrained(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


NAME = "bert.pooler.dense.weight"  # a tensor of the first or the second shard


@pytest.mark.parametrize("change, message", [
    (lambda names: {**names, NAME: "model-00003-of-00003.safetensors"}, "00003.safetensors: missing, but listed in"),
    (lambda names: {**names, NAME: "../weights.safetensors"}, "'../weights.safetensors' must be the name of a file in"),
    (lambda names: {**names, NAME: "/weights.safetensors"}, "'/weights.safetensors' must be the name of a file in"),
    (lambda names: {**names, NAME: FIRST if names[NAME] == SECOND else SECOND}, "is missing, but the index lists it"),
    (lambda names: {**names, "bert.more": FIRST}, f"{FIRST}: bert.more is missing, but the index lists it; copy the"),
    (lambda names: {}, f"{INDEX}: weight_map lists no tensors; copy the file again"),
    (lambda names: {NAME: 5}, f"{INDEX}: damaged, or not in the expected format"),
    (lambda names: [NAME], f"{INDEX}: damaged, or not in the expected format"),
])  # fmt: skip
def test_a_damaged_index_is_refused(change, message, sharded):
    names = json.loads((sharded / INDEX).read_text())["weight_map"]
    (sharded / INDEX).write_text(json.dumps({"weight_map": change(names)}))
    assert message in refusal(sharded)


def test_damaged_shards_are_refused(sharded):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {NAME: FIRST, "bert.pooler.dense.bias": SECOND}}))
    assert same(pretrained.read_pretrained(sharded).params, pretrained.read_pretrained(GOLDEN).params)
    whole = (sharded / SECOND).read_bytes()
    shutil.copy(sharded / FIRST, sharded / SECOND)
    assert f"{SECOND}: bert." in refusal(sharded) and f"is in {FIRST} too; delete the file" in refusal(sharded)
    (sharded / SECOND).write_bytes(whole[:1000])
    assert f"{SECOND}: damaged or truncated" in refusal(sharded)
    (sharded / INDEX).write_text("{")
    assert f"{INDEX}: damaged, or not in the expected format" in refusal(sharded)


def test_weights_of_more_than_the_limit_are_written_as_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    conversion.convert(GOLDEN, tmp_path / "out", "huggingface")
    index, files = json.loads((tmp_path / "out" / INDEX).read_text()), sorted((tmp_path / "out").glob("*.safetensors"))
    assert not (tmp_path / "out" / huggingface.WEIGHTS).exists()
    assert {path.name for path in files} == {*index["weight_map"].values()} and len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    sizes = [sum(x.nbytes for x in safetensors.numpy.load_file(path).values()) for path in files]
    assert all(size <= 20_000 for size in sizes)
    assert same(pretrained.read_pretrained(tmp_path / "out").params, pretrained.read_pretrained(GOLDEN).params)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_dtypes_are_read_and_written_as_float32(dtype, folder, tmp_path):
    rounded = {name: tensor.astype(dtype) for name, tensor in TENSORS.items()}
    safetensors.numpy.save_file(rounded, folder / huggingface.WEIGHTS)
    edit(folder / "config.json", torch_dtype=np.dtype(dtype).name)
    conversion.convert(folder, tmp_path / "out", "huggingface")
    written = safetensors.numpy.load_file(tmp_path / "out" / huggingface.WEIGHTS)
    assert all(written[name].dtype == np.float32 for name in TENSORS)
    assert all((written[name] == rounded[name].astype(np.float32)).all() for name in TENSORS)
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert fields["dtype"] == "float32" and "torch_dtype" not in fields


METHODS = {
    **{method: ({"quant_method": method}, name) for method, name in quantization.METHODS.items()},
    "8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes, 8 bits"),
    "4 bits": ({"load_in_4bit": True}, "bitsandbytes, 4 bits"),
    "a new method": ({"quant_method": "newq"}, "newq"),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_quantization_config_is_refused_by_the_name_of_the_method(method, folder):
    config, name = METHODS[method]
    safetensors.numpy.save_file(TENSORS, folder / huggingface.WEIGHTS)
    edit(folder / "config.json", quantization_config=config)
    message = f"config.json: quantization_config: weights of {name} are not supported; expected float weights; use the "
    assert message in refusal(folder)


def test_a_quantization_config_without_a_method_is_refused(folder):
    edit(folder / "config.json", quantization_config=[5])
    assert "quantization_config [5] is not supported; expected float weights" in refusal(folder)


LAYER = "bert.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize("tensors, message", [
    ({f"{LAYER}.qweight": np.int32, f"{LAYER}.qzeros": np.int32, f"{LAYER}.scales": np.float16}, "GPTQ or AWQ"),
    ({f"{LAYER}.weight": np.int8, f"{LAYER}.SCB": np.float32}, "bitsandbytes, 8 bits"),
    ({f"{LAYER}.weight": np.uint8, f"{LAYER}.weight.absmax": np.uint8}, "bitsandbytes, 4 bits"),
    ({f"{LAYER}.weight_packed": np.int32, f"{LAYER}.weight_scale": np.float16}, "compressed-tensors"),
    ({f"{LAYER}.weight": np.float32, f"{LAYER}.weight_scale_inv": np.float32}, "FP8"),
    ({f"{LAYER}.W_q": np.uint8}, "HQQ"),
])  # fmt: skip
def test_quantized_tensors_without_a_config_are_refused_by_name(tensors, message, folder):
    quantized = {name: np.ones((4, 4), dtype) for name, dtype in tensors.items()}
    others = {name: x for name, x in TENSORS.items() if not name.startswith(LAYER)}
    safetensors.numpy.save_file(others | quantized, folder / huggingface.WEIGHTS)
    assert f"is a tensor of {message}, which is not supported; expected float weights; " in refusal(folder)


def test_floats_of_8_bits_are_refused(folder):
    content = safetensors.numpy.save({NAME: TENSORS[NAME].astype(np.uint8)})
    (folder / huggingface.WEIGHTS).write_bytes(content.replace(b'"dtype":"U8"', b'"dtype":"F8_E4M3"', 1))
    path = folder / huggingface.WEIGHTS
    size = int.from_bytes(path.read_bytes()[:8], "little") + len("F8_E4M3") - len("U8")
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    assert f"{NAME} has dtype F8_E4M3; expected floats of 16, 32 or 64 bits" in refusal(folder)


def test_weights_of_gguf_are_refused(folder):
    (folder / "bert-q4_0.gguf").write_bytes(b"GGUF")
    assert "bert-q4_0.gguf: weights of GGUF are not supported; use the model without quantization" in refusal(folder)


@pytest.mark.parametrize("value", [None, "yes", 1])
def test_tie_word_embeddings_must_be_true_or_false(value, folder):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": value}))
    assert f"tie_word_embeddings is {value!r}; expected true or false; correct the value" in refusal(folder)

"""Names the quantization of a folder of transformers. bertjax reads floats only."""

from collections.abc import Mapping
from typing import Any

from etils import epath

from bertjax.common.errors import UserError

# {quantization_config.quant_method: the name of the method}. The message shows other methods by their value.
METHODS = {
    "aqlm": "AQLM", "auto-round": "AutoRound", "awq": "AWQ", "bitnet": "BitNet", "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors", "eetq": "EETQ", "fbgemm_fp8": "FBGEMM FP8", "fp8": "FP8",
    "gguf": "GGUF", "gptq": "GPTQ", "higgs": "HIGGS", "hqq": "HQQ", "mxfp4": "MXFP4", "quanto": "Quanto",
    "quark": "Quark", "spqr": "SpQR", "torchao": "torchao", "vptq": "VPTQ",
}  # fmt: skip
# {field of a config of bitsandbytes: the name of the method}. Old configs have no quant_method.
BITS = {"load_in_8bit": "bitsandbytes, 8 bits", "load_in_4bit": "bitsandbytes, 4 bits"}
# {last part of a tensor name: the method that stores such a tensor}
TENSORS = {
    **dict.fromkeys(("qweight", "qzeros"), "GPTQ or AWQ"),
    **dict.fromkeys(("absmax", "quant_map"), BITS["load_in_4bit"]),
    "SCB": BITS["load_in_8bit"], "weight_packed": "compressed-tensors", "weight_scale": "FP8 or compressed-tensors",
    "weight_scale_inv": "FP8", "W_q": "HQQ", "codebooks": "AQLM", "_data": "Quanto",
}  # fmt: skip
REMEDY = (
    "use the model without quantization, or load the model with transformers and call dequantize() and "
    "save_pretrained()"
)


def check_config(path: epath.Path, fields: Mapping[str, Any]) -> None:
    """Raises `UserError` with the name of the method if a config.json has a quantization_config.

    Args:
      path: the file, for messages.
      fields: the content of the file.
    """
    if (config := fields.get("quantization_config")) is None:
        return
    settings = config if isinstance(config, dict) else {}
    method = str(settings.get("quant_method") or "")
    name = next((name for field, name in BITS.items() if settings.get(field)), METHODS.get(method, method))
    shown = f"quantization_config: weights of {name} are" if name else f"quantization_config {config!r} is"
    raise UserError(f"{path}: {shown} not supported; expected float weights; {REMEDY}")


def check_tensor(path: epath.Path, name: str, dtype: str, is_float: bool) -> None:
    """Raises `UserError` if a tensor belongs to quantized weights.

    `models.tensors` checks tensors of integers, because constants such as position ids are integers as well.

    Args:
      path: the file, for messages.
      name: the name of the tensor.
      dtype: the dtype of the tensor, for messages.
      is_float: False for a float of less than 16 bits, a complex number, or an unknown dtype.
    """
    if method := TENSORS.get(name.rpartition(".")[2]):
        raise UserError(
            f"{path}: {name} is a tensor of {method}, which is not supported; expected float weights; {REMEDY}"
        )
    if not is_float:
        raise UserError(f"{path}: {name} has dtype {dtype}; expected floats of 16, 32 or 64 bits; {REMEDY}")

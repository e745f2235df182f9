"""Exports a checkpoint as an ONNX file, with the config and the tokenizer of transformers."""

import logging
import pathlib
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import export
from jax.errors import InconclusiveDimensionOperation
from jax.extend import core

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.export.inline_jaxpr import straight
from bertjax.export.outputs import check_exportable_rows, exported_function, new_folder
from bertjax.inference.abilities import task_of
from bertjax.interop import cross_encoder, huggingface, sentence_transformers
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families

FOLDER, PROGRAM, INT8 = "onnx", "model.onnx", "model_int8.onnx"  # the paths that transformers.js reads
INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # int64 [batch, length]
# jax2onnx needs an older orbax-checkpoint than training needs.
INSTALL = "pip install 'bertjax[onnx]' in an environment of its own (docs/install.md, ONNX export)"
LARGEST = 2**31 - 2**24  # bytes of params in the file; the limit of protobuf is 2 GiB


def write(output: epath.PathLike, source: Pretrained, has_int8: bool = False) -> str:
    """Writes onnx/model.onnx of a checkpoint, and returns a summary in one line.

    The program computes in float32, for any number of rows of any length for which the model has positions. The inputs
    are the inputs of the transformers class that the network uses. The outputs have the names in this class, or the
    name `sentence_embedding`.

    Args:
      output: the folder.
      source: the checkpoint.
      has_int8: also writes model_int8.onnx, with the weights of matrix products and embeddings in 8 bits. Activations
        are quantized dynamically.

    Raises:
      UserError: the checkpoint cannot be exported (`outputs.check_exportable_rows`), the folder is not empty, or ONNX
        cannot represent the network.
    """
    if "://" in str(output):
        raise UserError(f"--output={output}: ONNX's tools write local files only; name a local folder")
    check_exportable_rows(source)
    outputs = _output_names(source)
    files, left_out = _definition(source), [f"{name} = {value:.4g}" for name, value in source.decided.items()]
    data = source.settings.get("data", {})
    left_out += [name for name in ("query_prompt", "document_prompt") if data.get(name)]
    if not files:
        left_out.append("config.json, since transformers has no class for this form")
    with new_folder(output) as folder:
        inputs, model, size = _converted(source, outputs)
        sizes = _save(pathlib.Path(folder / FOLDER), model, size > LARGEST, has_int8)
        for name, content in files.items():
            write_whole(folder / name, content)
        if source.tokenizer:
            source.tokenizer.save(folder)
    conversion = f"from {', '.join(inputs)} to {', '.join(outputs)}"
    summary = f"{source.format} -> onnx: {conversion}; {', '.join(sizes)} in {epath.Path(output) / FOLDER}"
    return f"{summary}; left out: {', '.join(left_out)}" if left_out else summary


def _converted(source: Pretrained, outputs: tuple[str, ...]) -> tuple[tuple[str, ...], Any, int]:
    """Returns the names of the inputs, the ONNX model, and the bytes of the params."""
    try:
        import onnx
        from jax2onnx import to_onnx
    except ModuleNotFoundError as error:
        raise UserError(f"--format=onnx: needs {error.name}; {INSTALL}") from None
    except ImportError as error:
        raise UserError(f"--format=onnx: {str(error).splitlines()[0]}; {INSTALL}") from None
    for name in ("onnx_ir", "jax2onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn about shapes without types
    try:
        inputs, program = _program(source, len(outputs))
        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in program.jaxpr.invars]
        model = to_onnx(core.jaxpr_as_fun(program), shapes, input_names=inputs, output_names=outputs)
        _name_products(onnx, model)
        _take_int64(onnx, model)
    except InconclusiveDimensionOperation:
        field = "head.lstm_size" if "lstm" in source.params else f"model.family = {source.config.family!r}"
        raise UserError(
            f"{source.path}: ONNX has no program for texts of any length with {field}; use --format=stablehlo, which "
            f"writes a program per length"
        ) from None
    except NotImplementedError as error:
        raise UserError(
            f"{source.path}: ONNX does not support the model ({str(error).splitlines()[0]}); use --format=stablehlo"
        ) from None
    return inputs, model, sum(np.asarray(x).nbytes for x in program.consts)


def _save(folder: pathlib.Path, model: Any, is_large: bool, has_int8: bool) -> list[str]:
    """Writes the files, and returns their names and sizes."""
    import onnx
    from onnxruntime import quantization

    folder.mkdir()
    onnx.save_model(model, folder / PROGRAM, save_as_external_data=is_large, location=f"{PROGRAM}_data")
    if has_int8:
        with tempfile.TemporaryDirectory() as temporary:
            folded = pathlib.Path(temporary, PROGRAM)
            large = dict(save_as_external_data=is_large, all_tensors_to_one_file=True)
            quantization.quant_pre_process(folder / PROGRAM, folded, skip_symbolic_shape=True, **large)
            options = dict(op_types_to_quantize=["MatMul", "Gather"], per_channel=True)
            quantization.quantize_dynamic(folded, folder / INT8, use_external_data_format=is_large, **options)
    return [f"{file.name} ({file.stat().st_size / 1e6:,.1f} MB)" for file in sorted(folder.iterdir())]


def _output_names(source: Pretrained) -> tuple[str, ...]:
    """Returns the names of the outputs. Several outputs are parts of the last axis of the result of the network."""
    if source.architecture.endswith("ForQuestionAnswering"):
        return ("start_logits", "end_logits")
    if source.architecture == sentence_transformers.ARCHITECTURE:
        return ("sentence_embedding",)
    return ("logits",) if task_of(source) or source.predicts_words else ("last_hidden_state",)


def _program(source: Pretrained, parts: int) -> tuple[tuple[str, ...], core.ClosedJaxpr]:
    """Returns the names of the used inputs, and the network as a program of int32 `[rows, length]` of any size."""
    run, params = exported_function(source), jax.tree.map(np.asarray, source.params)

    def compute(*inputs: jax.Array) -> list[jax.Array]:
        outputs = run(params, dict(zip(("input_ids", "segments", "token_types"), inputs)), None)
        return [outputs] if parts == 1 else [outputs[..., part] for part in range(parts)]

    shape = export.symbolic_shape("rows, length")
    program = straight(compute, *[jax.ShapeDtypeStruct(shape, jnp.int32)] * len(INPUTS))
    read = {id(x) for equation in program.jaxpr.eqns for x in equation.invars}
    used = {name: variable for name, variable in zip(INPUTS, program.jaxpr.invars) if id(variable) in read}
    return tuple(used), core.ClosedJaxpr(program.jaxpr.replace(invars=list(used.values())), program.consts)


def _name_products(onnx: Any, model: Any) -> None:
    """Converts products with matrices to `MatMul`, the only product that can be quantized.

    Raises:
      NotImplementedError: the model has a loop or a condition.
    """
    constants = {constant.name: constant for constant in model.graph.initializer}
    for node in model.graph.node:
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        is_matrix = False
        if any(attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute):
            raise NotImplementedError(f"{node.op_type} is a loop or a branch")
        if node.op_type == "Gemm":
            biases = [constants[name] for name in node.input[2:] if name in constants]
            has_bias = len(biases) < len(node.input[2:]) or any(np.any(onnx.numpy_helper.to_array(x)) for x in biases)
            transposes = attributes.get("transA") or attributes.get("transB")
            is_matrix = not (transposes or attributes.get("alpha", 1) != 1 or (attributes.get("beta", 1) and has_bias))
        elif node.op_type == "Einsum":
            left, right, result = re.split(",|->", attributes["equation"].decode().replace(" ", ""))
            is_matrix = len(right) == 2 and left[-1] == right[0] and result == left[:-1] + right[1]
        if is_matrix:
            node.op_type = "MatMul"
            del node.input[2:], node.attribute[:]
    read = {name for node in model.graph.node for name in node.input}
    for name in constants.keys() - read:
        model.graph.initializer.remove(constants[name])


def _take_int64(onnx: Any, model: Any) -> None:
    """Makes the inputs int64, the type of the outputs of tokenizers."""
    for graph_input in model.graph.input:
        narrow = f"{graph_input.name}_int32"
        for node in model.graph.node:
            node.input[:] = [narrow if name == graph_input.name else name for name in node.input]
        graph_input.type.tensor_type.elem_type = onnx.TensorProto.INT64
        cast = onnx.helper.make_node("Cast", [graph_input.name], [narrow], to=onnx.TensorProto.INT32)
        model.graph.node.insert(0, cast)


def _definition(source: Pretrained) -> dict[str, str]:
    """Returns {name: content} of the files of the transformers class with these outputs; {} without such a class."""
    try:
        huggingface.check_exportable(source.config)
    except UserError:
        return {}
    layout, params, stated = families.huggingface_of(source.config), source.params, source.architecture
    if not task_of(source) or stated == sentence_transformers.ARCHITECTURE:
        encoder = {name: value for name, value in params["bert"].items() if name != "pooler"}
        words = {"masked_lm": params["masked_lm"]} if source.predicts_words and "masked_lm" in params else {}
        params, stated = {"bert": encoder, **words}, ""
    architecture = layout.choose_architecture(params, source.config, stated)
    activation = cross_encoder.activation_of(source.settings, source.problem_type)
    metadata = huggingface.Metadata(source.labels, source.problem_type, activation, source.model_max_length)
    return huggingface.definition(source.config, params, source.tokenizer, architecture, metadata)

"""A checkpoint as an ONNX file beside the config and tokenizer of transformers, as ONNX Runtime's users have them."""

import logging
import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import export
from jax.errors import InconclusiveDimensionOperation
from jax.extend import core

from bertjax import families
from bertjax.config import UserError
from bertjax.files import write_whole
from bertjax.interop import huggingface, sentence_transformers
from bertjax.interop.pretrained import Pretrained
from bertjax.tasks import exported
from bertjax.tasks.exported.straight import straight

FOLDER, PROGRAM, INT8 = "onnx", "model.onnx", "model_int8.onnx"  # where transformers.js and sentence-transformers look
INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # int64 [batch, length]
LARGEST = 2**31 - 2**24  # bytes of params in the file itself: protobuf's limit is 2 GiB
NEEDED = "pip install 'bertjax[onnx]'"


def write(output: epath.PathLike, source: Pretrained, has_int8: bool = False) -> str:
    """Writes onnx/model.onnx of a checkpoint, for any number of rows and tokens, in float32; returns a summary.

    Its inputs are those of transformers' class that the network uses, its outputs have that class's names, or are
    `sentence_embedding`. `has_int8`: writes model_int8.onnx beside it as well, with the weights of matrix products
    and embeddings in 8 bits; activations are quantized as they come. Raises `UserError` as `exported.check` does.
    """
    output = exported.check(output, source)
    try:
        import onnx
        from jax2onnx import to_onnx
        from onnxruntime import quantization
    except ImportError as error:
        raise UserError(f"--format=onnx: needs {error.name}; {NEEDED}") from None
    if "://" in str(output):
        raise UserError(f"--output={output}: ONNX's tools write local files only; name a local folder")

    for name in ("onnx_ir", "jax2onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn that some shapes have no type
    outputs = _names(source)
    try:
        inputs, program = _program(source, len(outputs))
        shapes = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in program.jaxpr.invars]
        model = to_onnx(core.jaxpr_as_fun(program), shapes, input_names=inputs, output_names=outputs)
    except (InconclusiveDimensionOperation, NotImplementedError):
        raise UserError(
            f"{source.path}: a model with model.family = {source.config.family!r} has no one program for texts of any "
            f"length; --format=stablehlo writes several"
        ) from None
    _name_products(model)
    _take_int64(onnx, model)
    folder = pathlib.Path(output / FOLDER)
    folder.mkdir(parents=True)
    is_large = sum(np.asarray(x).nbytes for x in program.consts) > LARGEST
    onnx.save_model(model, folder / PROGRAM, save_as_external_data=is_large, location=f"{PROGRAM}_data")
    if has_int8:
        with tempfile.TemporaryDirectory() as place:
            folded = pathlib.Path(place, PROGRAM)
            large = dict(save_as_external_data=is_large, all_tensors_to_one_file=True)
            quantization.quant_pre_process(folder / PROGRAM, folded, skip_symbolic_shape=True, **large)
            how = dict(op_types_to_quantize=["MatMul", "Gather"], per_channel=True, use_external_data_format=is_large)
            quantization.quantize_dynamic(folded, folder / INT8, **how)
    for name, content in _definition(source).items():
        write_whole(output / name, content)
    if source.tokenizer:
        source.tokenizer.save(output)
    sizes = [f"{file.name} ({file.stat().st_size / 1e6:,.1f} MB)" for file in sorted(folder.iterdir())]
    takes, gives = ", ".join(inputs), ", ".join(outputs)
    return f"{source.format} -> onnx: from {takes} to {gives}; {', '.join(sizes)} in {folder}"


def _names(source: Pretrained) -> tuple[str, ...]:
    """Returns the names of the outputs; several share the last axis of what the network computes."""
    if source.architecture.endswith("ForQuestionAnswering"):
        return ("start_logits", "end_logits")
    if source.architecture == sentence_transformers.ARCHITECTURE:
        return ("sentence_embedding",)
    has_layer = source.settings.get("task", "") not in ("", "pretraining") or source.predicts_words
    return ("logits",) if has_layer else ("last_hidden_state",)


def _program(source: Pretrained, parts: int) -> tuple[tuple[str, ...], core.ClosedJaxpr]:
    """Returns the inputs that the network uses, and the network: of int32 `[rows, length]` of any size."""
    run, params = exported.outputs(source), jax.tree.map(np.asarray, source.params)

    def compute(*inputs):
        found = run(params, dict(zip(("input_ids", "segments", "token_types"), inputs)), None)
        return [found] if parts == 1 else [found[..., part] for part in range(parts)]

    shape = export.symbolic_shape("rows, length")
    program = straight(compute, *[jax.ShapeDtypeStruct(shape, jnp.int32)] * len(INPUTS))
    read = {id(x) for equation in program.jaxpr.eqns for x in equation.invars}
    used = {name: given for name, given in zip(INPUTS, program.jaxpr.invars) if id(given) in read}
    return tuple(used), core.ClosedJaxpr(program.jaxpr.replace(invars=list(used.values())), program.consts)


def _name_products(model) -> None:
    """Makes products with matrices `MatMul`, which is the one that can be quantized."""
    for node in model.graph.node:
        if node.op_type == "Einsum":
            (equation,) = (attribute.s.decode() for attribute in node.attribute)
            left, right, result = re.split(",|->", equation.replace(" ", ""))
            is_matrix = len(right) == 2 and left[-1] == right[0] and result == left[:-1] + right[1]
        else:
            is_matrix = node.op_type == "Gemm"  # of `straight`: without a transpose, and with a bias of zero
        if is_matrix:
            node.op_type = "MatMul"
            del node.input[2:], node.attribute[:]
    read = {name for node in model.graph.node for name in node.input}
    for constant in [each for each in model.graph.initializer if each.name not in read]:
        model.graph.initializer.remove(constant)


def _take_int64(onnx, model) -> None:
    """Makes the inputs int64, as tokenizers give them."""
    for given in model.graph.input:
        narrow = f"{given.name}_int32"
        for node in model.graph.node:
            node.input[:] = [narrow if name == given.name else name for name in node.input]
        given.type.tensor_type.elem_type = onnx.TensorProto.INT64
        cast = onnx.helper.make_node("Cast", [given.name], [narrow], to=onnx.TensorProto.INT32)
        model.graph.node.insert(0, cast)


def _definition(source: Pretrained) -> dict[str, str]:
    """Returns what transformers reads beside the program; nothing if it has no class for the model."""
    try:
        huggingface.check_form(source.config)
    except UserError:
        return {}
    if "lstm" in source.params:
        return {}
    layout = families.module_of(families.of(source.config))
    is_vectors = source.architecture == sentence_transformers.ARCHITECTURE
    params = {"bert": source.params["bert"]} if is_vectors else source.params
    architecture = layout.choose_architecture(params, source.config, "" if is_vectors else source.architecture)
    return huggingface.definition(
        source.config, params, source.tokenizer, architecture, source.labels, source.problem_type
    )

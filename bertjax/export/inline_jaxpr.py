"""Simplifies a traced function for other compilers: no loops, no calls, and plain matrix products with the params."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Primitive that calls a program -> the parameter that holds the program. `jax.checkpoint` has three names.
CALLS = dict.fromkeys(("jit", "checkpoint", "remat", "remat2"), "jaxpr")
CALLS |= dict.fromkeys(("closed_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr")


def straight(function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> core.ClosedJaxpr:
    """Traces a function into a program in which each layer has separate equations.

    Values that depend on no argument, such as the params of a layer, are constants of the program. Shapes may be
    symbolic.
    """
    traced = jax.make_jaxpr(function)(*arguments)
    return jax.make_jaxpr(lambda *inputs: _run(traced, inputs))(*arguments)


def _run(program: core.ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *arguments], strict=True))

    def read(variables: Sequence[Any]) -> list[Any]:
        return [x.val if isinstance(x, core.Literal) else values[x] for x in variables]

    for equation in jaxpr.eqns:
        operands = read(equation.invars)
        sizes = [size for result in equation.outvars for size in result.aval.shape]
        is_constant = operands and all(map(_is_known, operands)) and all(isinstance(size, int) for size in sizes)
        with jax.ensure_compile_time_eval() if is_constant else contextlib.nullcontext():
            values.update(zip(equation.outvars, _results(equation, operands), strict=True))
    return read(jaxpr.outvars)


def _is_known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def _results(equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name == "scan" and isinstance(params["length"], int):
        return _unrolled(operands, **params)
    if primitive.name in CALLS:
        inner = params[CALLS[primitive.name]]
        return _run(inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ()), operands)
    if primitive.name == "dot_general" and sum(map(_is_known, operands)) == 1:
        return [_product(*operands, **params)]
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def _unrolled(operands: list[Any], *, jaxpr: core.ClosedJaxpr, length: int, reverse: bool, **params: Any) -> list[Any]:
    """Computes `jax.lax.scan` step by step."""
    if "ft_in" in params:  # from JAX 0.11 on: constants, carry and inputs, each with a leaf for each operand
        num_consts, num_carry = map(len, params["ft_in"].elts[:2])
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    end, outputs = num_consts + num_carry, []
    constants, carry, inputs = operands[:num_consts], operands[num_consts:end], operands[end:]
    for step in reversed(range(length)) if reverse else range(length):
        inputs_of_step = [np.asarray(x)[step] if _is_known(x) else x[step] for x in inputs]
        results = _run(jaxpr, [*constants, *carry, *inputs_of_step])
        carry = results[:num_carry]
        outputs.append(results[num_carry:])
    stacked = zip(*(reversed(outputs) if reverse else outputs))
    return [*carry, *map(jax.numpy.stack, stacked)]


def _product(
    left: Any, right: Any, *, dimension_numbers: Any, precision: Any, preferred_element_type: Any, **params: Any
) -> jax.Array:
    """Computes `jax.lax.dot_general` of an array and a constant as a product with a matrix `[contracted, remaining]`.

    Products with batch axes are computed without changes.
    """
    (left_axes, right_axes), batch_axes = dimension_numbers
    if batch_axes != ((), ()):
        options = dict(precision=precision, preferred_element_type=preferred_element_type)
        return jax.lax.dot_general(left, right, dimension_numbers, **options)
    if is_left := _is_known(left):
        left, right, left_axes, right_axes = right, left, right_axes, left_axes
    weight, free = np.asarray(right), [axis for axis in range(left.ndim) if axis not in left_axes]
    remaining = [axis for axis in range(weight.ndim) if axis not in right_axes]
    contracted = math.prod(weight.shape[axis] for axis in right_axes)
    matrix = weight.transpose(*right_axes, *remaining).reshape(contracted, -1)
    order = [*free, *left_axes]
    rows = left if order == sorted(order) else left.transpose(order)
    shape = rows.shape[: len(free)]
    product = (rows.reshape(*shape, contracted) @ matrix).reshape(*shape, *(weight.shape[axis] for axis in remaining))
    return jax.numpy.moveaxis(product, range(len(free)), range(-len(free), 0)) if is_left else product

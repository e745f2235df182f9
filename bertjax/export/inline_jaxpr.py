"""Programs as what other compilers read best: no loops, no calls, and products with params as plain matrix products."""

import contextlib
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend import core

# Primitives that call a program, and the name that they have for it; `jax.checkpoint` is called by three names.
CALLS = dict.fromkeys(("jit", "checkpoint", "remat", "remat2"), "jaxpr")
CALLS |= dict.fromkeys(("closed_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr")


def straight(function: Callable, *arguments: jax.ShapeDtypeStruct) -> core.ClosedJaxpr:
    """Traces a function into a program in which each layer stands by itself.

    What depends on no argument, such as the params of a layer, is a constant of the program. Shapes may be symbolic.
    """
    traced = jax.make_jaxpr(function)(*arguments)
    return jax.make_jaxpr(lambda *given: _run(traced, given))(*arguments)


def _run(program: core.ClosedJaxpr, arguments: Sequence) -> list:
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *arguments], strict=True))
    for equation in jaxpr.eqns:
        operands = [x.val if isinstance(x, core.Literal) else values[x] for x in equation.invars]
        sizes = [size for result in equation.outvars for size in result.aval.shape]
        now = operands and all(map(_is_known, operands)) and all(isinstance(size, int) for size in sizes)
        with jax.ensure_compile_time_eval() if now else contextlib.nullcontext():
            values.update(zip(equation.outvars, _results(equation, operands), strict=True))
    return [x.val if isinstance(x, core.Literal) else values[x] for x in jaxpr.outvars]


def _is_known(x) -> bool:
    return not isinstance(x, jax.core.Tracer)


def _results(equation: core.JaxprEqn, operands: list) -> Sequence:
    primitive, params = equation.primitive, equation.params
    if primitive.name == "scan" and isinstance(params["length"], int):
        return _each_step(operands, **params)
    if primitive.name in CALLS:
        inner = params[CALLS[primitive.name]]
        return _run(inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ()), operands)
    if primitive.name == "dot_general" and sum(map(_is_known, operands)) == 1:
        return [_product(*operands, **params)]
    found = primitive.bind(*operands, **primitive.get_bind_params(params))
    return found if primitive.multiple_results else [found]


def _each_step(operands: list, *, jaxpr, length: int, reverse: bool, **others) -> list:
    """As `jax.lax.scan`, step by step."""
    if "ft_in" in others:  # from JAX 0.11 on: constants, carry and inputs, each with a leaf for each operand
        num_consts, num_carry = map(len, others["ft_in"].elts[:2])
    else:
        num_consts, num_carry = others["num_consts"], others["num_carry"]
    end, steps = num_consts + num_carry, []
    constants, carry, inputs = operands[:num_consts], operands[num_consts:end], operands[end:]
    for step in reversed(range(length)) if reverse else range(length):
        parts = [np.asarray(x)[step] if _is_known(x) else x[step] for x in inputs]
        found = _run(jaxpr, [*constants, *carry, *parts])
        carry = found[:num_carry]
        steps.append(found[num_carry:])
    each = zip(*(reversed(steps) if reverse else steps))
    return [*carry, *(jax.numpy.stack(outputs) for outputs in each)]


def _product(left, right, *, dimension_numbers, precision, preferred_element_type, **_):
    """As `jax.lax.dot_general` with an array and a constant, which becomes a matrix `[contracted, others]`."""
    (of_left, of_right), batched = dimension_numbers
    if batched != ((), ()):
        numbers = dict(precision=precision, preferred_element_type=preferred_element_type)
        return jax.lax.dot_general(left, right, dimension_numbers, **numbers)
    is_left = _is_known(left)
    x, weight = (right, np.asarray(left)) if is_left else (left, np.asarray(right))
    of_x, of_weight = (of_right, of_left) if is_left else (of_left, of_right)
    others = [axis for axis in range(weight.ndim) if axis not in of_weight]
    free = [axis for axis in range(x.ndim) if axis not in of_x]
    matrix = weight.transpose(*of_weight, *others)
    matrix = matrix.reshape(math.prod(weight.shape[axis] for axis in of_weight), -1)
    order = [*free, *of_x]
    x = x if order == sorted(order) else x.transpose(order)
    kept = x.shape[: len(free)]
    found = (x.reshape(*kept, matrix.shape[0]) @ matrix).reshape(*kept, *(weight.shape[axis] for axis in others))
    if not is_left:
        return found
    count = len(others)
    return found.transpose(*range(len(free), len(free) + count), *range(len(free)))

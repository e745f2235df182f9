"""Sentence order: whether two consecutive segments are swapped (ALBERT; Lan et al. 2020, section 3.1)."""

import functools

from bertjax.objectives import Objective, pairs

OBJECTIVE = Objective(
    loss=pairs.loss,
    scores=pairs.scores,
    report=functools.partial(pairs.report, "sentence order"),
    heads=pairs.heads,
    baselines=pairs.baselines,
    flops=pairs.flops,
    validate=functools.partial(pairs.validate, needed="order"),
    plots=pairs.PLOTS,
)

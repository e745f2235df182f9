"""Next sentence: whether segment B follows segment A, or is a random one (Devlin et al. 2019, section 3.1)."""

import functools

from bertjax.objectives import Objective, pairs

OBJECTIVE = Objective(
    loss=pairs.loss,
    scores=pairs.scores,
    report=functools.partial(pairs.report, "next sentence"),
    heads=pairs.heads,
    baselines=pairs.baselines,
    flops=pairs.flops,
    validate=functools.partial(pairs.validate, needed="pairs"),
    plots=pairs.PLOTS,
)

"""The old name of `bertjax.training.optim.optimizers`, for experiments and packages that import it."""

from bertjax.training.optim.optimizers import *  # noqa: F403

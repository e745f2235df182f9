"""The old name of `bertjax.training.optim.schedules`, for experiments and packages that import it."""

from bertjax.training.optim.schedules import *  # noqa: F403

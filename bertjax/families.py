"""The old name of `bertjax.models.families`, for experiments and packages that import it."""

from bertjax.models.families import *  # noqa: F403

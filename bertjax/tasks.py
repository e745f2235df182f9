"""The old name of `bertjax.inference.tasks`, for experiments and packages that import it."""

from bertjax.inference.tasks import *  # noqa: F403

"""The old name of `bertjax.models`, for experiments and packages that import it."""

from bertjax.models.families import *  # noqa: F403
from bertjax.models.family import *  # noqa: F403

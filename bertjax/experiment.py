"""The old name of `bertjax.config.experiments`, for programs that import it."""

from bertjax.config.experiments import *  # noqa: F403

"""The old name of `bertjax.training.trackers.trackers`, for experiments and packages that import it."""

from bertjax.training.trackers.trackers import *  # noqa: F403
from bertjax.training.trackers.trackers import Tracker as Sink  # noqa: F401

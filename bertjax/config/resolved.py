"""The two phases of a config.

The user's config is a `ConfigDict`: an experiment with the user's overrides, which may leave fields open. The resolved
config is a `ResolvedConfig`: the earlier run or the checkpoint has determined the open fields. A run trains with the
resolved config, and stores it as JSON in the workdir.
"""

import copy
from typing import NamedTuple

from ml_collections import ConfigDict


class ResolvedConfig(ConfigDict):
    """A config whose open fields are determined."""

    @classmethod
    def copy_of(cls, config: ConfigDict) -> "ResolvedConfig":
        """Returns a copy of a user's config, in which the fields are then set."""
        resolved = copy.deepcopy(config)
        object.__setattr__(resolved, "__class__", cls)  # The constructor would sort the fields.
        return resolved


class Resolution(NamedTuple):
    """A resolved config, and the decisions to print, such as "from runs/mine: max_seq_length = 64"."""

    config: ResolvedConfig
    decisions: tuple[str, ...] = ()

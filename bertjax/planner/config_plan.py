"""The plan of a config for chips, which this machine need not have."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.distributed.gpus import Machines
from bertjax.distributed.topology import Accelerator
from bertjax.launch.start import kind_of
from bertjax.planner import summary
from bertjax.planner.plan import StagePlan, plan, settings_that_fit


@dataclasses.dataclass(frozen=True)
class ConfigPlan:
    """The plans of all stages of a config.

    Attributes:
      config: the resolved config.
      target: the chips.
      shares: with packing, the share of tokens that are not padding, for each stage.
      stages: the plans of the stages.
    """

    config: ConfigDict
    target: Accelerator | Machines
    shares: Sequence[float]
    stages: list[StagePlan]

    def as_json(self, price_per_chip_hour: float | None = None) -> str:
        """Returns a JSON list with an object for each stage."""
        return summary.as_json(self.stages, price_per_chip_hour)

    def as_table(self, price_per_chip_hour: float | None = None) -> str:
        """Returns a table for a terminal."""
        return summary.as_table(self.stages, self.target, price_per_chip_hour)

    @property
    def failing(self) -> list[StagePlan]:
        """The plans of the stages that do not fit in memory."""
        return [stage for stage in self.stages if not stage.fits]

    def out_of_memory(self) -> str:
        """Returns a line about the failing stages, with settings that fit. Compiles until a setting fits."""
        numbers = [stage.stage for stage in self.failing]
        settings = next(settings_that_fit(self.config, self.target, numbers, self.shares), None)
        return summary.out_of_memory(self.failing, settings)


def plan_config(
    config: ConfigDict,
    target: Accelerator | Machines,
    shares: Sequence[float],
    on_decision: Callable[[str], None] = lambda line: None,
) -> ConfigPlan:
    """Compiles the stages of a validated config for chips.

    The process uses the CPU only, because the accelerators of this machine may be in use.

    Args:
      config: the validated config.
      target: the chips.
      shares: see `ConfigPlan`.
      on_decision: receives a line for each field that the checkpoint determines, before the stages are compiled.

    Raises:
      UserError: if the config does not fit the chips.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # Reading the cache needs the accelerator.
    resolved, decisions = kind_of(config).planning.resolve(config)
    for line in decisions:
        on_decision(line)
    return ConfigPlan(resolved, target, shares, plan(resolved, target, real_tokens_share=shares))


def parse_token_shares(config: ConfigDict, texts: Sequence[str]) -> list[float]:
    """Returns the values of --real_tokens_share.

    Raises:
      UserError: if the number of shares or a share is invalid, or if there are shares for a config without packing.
    """
    text, stages = ",".join(texts), len(config.get("stages", ("all",)))
    try:
        shares = [float(share) for share in texts]
    except ValueError:
        shares = [-1.0]
    if config.packing == bool(shares) and len(shares) in (0, stages) and all(0 < share <= 1 for share in shares):
        return shares
    if not config.packing:
        raise UserError(f"--real_tokens_share={text}: also set --config.packing=True, without which rows are padded")
    for_each = f"for each of the {stages} stages, " if stages > 1 else ""
    raise UserError(
        f"--real_tokens_share={text}: with config.packing, give one share {for_each}above 0 and at most 1, such as "
        f"{','.join(['0.7'] * stages)}; training without packing prints this share"
    )

"""Compiles a config for a TPU or for GPUs, without them.

    bertjax compile --config=large --topology=v5litepod-16

Prints memory per chip, FLOPs, collectives, and an estimate of the step time of each stage. The TPU compiler estimates
the step time; for GPUs, the command computes a lower bound. If a stage does not fit, tries settings until it does.
Needs libtpu, or JAX's CUDA plugin: pip install 'bertjax[aot]', or 'bertjax[aot-cuda]'.
"""

import functools
import sys

from absl import flags

from bertjax.cli.app import run_command
from bertjax.cli.flags import define_config_flag, define_required_flag, refuse_arguments
from bertjax.common.errors import UserError
from bertjax.training.signals import exit_on_signal

_CONFIG = define_config_flag()
_TOPOLOGY = define_required_flag(
    "topology",
    "The TPU as gcloud names it: v5litepod-16, v4-8, v6e-8, ...; or a number of GPUs: h100-8, l4-1, ...",
)
_SLICES = flags.DEFINE_integer("slices", 1, "Number of slices, connected by the data centre's network.")
_HOSTS = flags.DEFINE_integer("hosts", 1, "Number of machines with the GPUs of --topology.")
_PRICE = flags.DEFINE_float(
    "price", None, "Price of a chip in dollars per hour; adds the cost of all stages.", lower_bound=0
)
_JSON = flags.DEFINE_bool("json", False, "Print a JSON list with one object per stage instead of the table.")
_SHARE = flags.DEFINE_list(
    "real_tokens_share", [], "With --config.packing: per stage, the share of tokens that are not padding."
)
flags.DEFINE_alias("price_per_chip_hour", "price")
flags.DEFINE_alias("price-per-chip-hour", "price")
flags.DEFINE_alias("real-tokens-share", "real_tokens_share")


@exit_on_signal()
def main(arguments: list[str]) -> None:
    """Prints the plan of all stages, and settings that fit if a stage does not fit in memory."""
    refuse_arguments(arguments, "settings are given as --config.name=value")

    from bertjax.distributed.topology import accelerator
    from bertjax.launch.validate import validate

    config = _CONFIG.value
    validate(config, with_data=False)
    target = accelerator(_TOPOLOGY.value, _SLICES.value, _HOSTS.value)

    from bertjax.planner.config_plan import parse_token_shares, plan_config

    shares = parse_token_shares(config, _SHARE.value)
    plan = plan_config(config, target, shares, functools.partial(print, file=sys.stderr, flush=True))
    print(plan.as_json(_PRICE.value) if _JSON.value else plan.as_table(_PRICE.value), flush=True)
    if plan.failing:
        print("searching for settings that fit ...", file=sys.stderr, flush=True)
        raise UserError(plan.out_of_memory())


if __name__ == "__main__":
    run_command(main)

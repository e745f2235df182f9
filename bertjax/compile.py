"""Compiles a config for a TPU, without the TPU: python -m bertjax.compile --config=experiments/large.py \\
--topology=v5litepod-16

Says whether it fits, and how long it would take: memory a chip, FLOPs, transfers, the compiler's estimate of a step.
Where a stage does not fit, tries what would. Needs libtpu: pip install -e '.[aot]'.
"""

import signal
import sys

from absl import flags

from bertjax import command

_CONFIG = command.define_config_flag()
_TOPOLOGY = flags.DEFINE_string("topology", None, "The accelerator as gcloud names it: v5litepod-16, v4-8, v6e-8, ...")
_SLICES = flags.DEFINE_integer("slices", 1, "How many of them, connected by the data centre's network.")
_PRICE = flags.DEFINE_float("price_per_chip_hour", None, "Dollars; adds what the recipe costs.", lower_bound=0)
_JSON = flags.DEFINE_bool("json", False, "A JSON list with one object a stage instead of the table.")
flags.mark_flags_as_required(["config", "topology"])
flags.DEFINE_alias("price-per-chip-hour", "price_per_chip_hour")


def main(arguments: list[str]) -> None:
    from bertjax.config import UserError
    from bertjax.sharding.topology import accelerator
    from bertjax.validation import validate_pretraining

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; settings are given as --config.name=value")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # XLA would not hear Python's Ctrl-C, and there is nothing to save
    config = _CONFIG.value
    validate_pretraining(config, with_data=False)
    target = accelerator(_TOPOLOGY.value, _SLICES.value)

    import jax

    jax.config.update("jax_platforms", "cpu")  # whatever this machine has stays free
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot be read without the TPU

    from bertjax.planner import report
    from bertjax.planner.plan import plan, settings_that_fit

    plans = plan(config, target)
    print(report.as_json(plans) if _JSON.value else report.as_table(plans, target, _PRICE.value), flush=True)
    if failing := [result for result in plans if not result.fits]:
        print("trying what would fit ...", file=sys.stderr, flush=True)
        found = next(settings_that_fit(config, target, [result.stage for result in failing]), None)
        raise UserError(report.out_of_memory(failing, found))


if __name__ == "__main__":
    command.run(main)

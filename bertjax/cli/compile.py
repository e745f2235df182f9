"""Compiles a config for a TPU or for GPUs, without them: bertjax compile --config=large \\
--topology=v5litepod-16

Prints memory per chip, FLOPs, collectives, and an estimate of the step time of each stage. The TPU compiler estimates
the step time; for GPUs, the command computes a lower bound. If a stage does not fit, tries settings until it does.
Needs libtpu, or JAX's CUDA plugin: pip install -e '.[aot]', or '.[aot-cuda]'.
"""

import sys

from absl import flags

from bertjax.cli.app import run_command
from bertjax.cli.flags import define_config_flag, require_flags
from bertjax.training.signals import exit_on_signal

_CONFIG = define_config_flag()
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "The TPU as gcloud names it: v5litepod-16, v4-8, v6e-8, ...; or a number of GPUs: h100-8, l4-1, ...",
)
_SLICES = flags.DEFINE_integer("slices", 1, "Number of slices, connected by the data centre's network.")
_HOSTS = flags.DEFINE_integer("hosts", 1, "Number of machines that the GPUs of --topology are in.")
_PRICE = flags.DEFINE_float("price_per_chip_hour", None, "In dollars; adds the cost of all stages.", lower_bound=0)
_JSON = flags.DEFINE_bool("json", False, "Print a JSON list with one object per stage instead of the table.")
_SHARE = flags.DEFINE_list(
    "real_tokens_share", [], "With --config.packing: per stage, the share of tokens that are not padding."
)
require_flags("config", "topology")
flags.DEFINE_alias("price", "price_per_chip_hour")
flags.DEFINE_alias("price-per-chip-hour", "price_per_chip_hour")
flags.DEFINE_alias("real-tokens-share", "real_tokens_share")


@exit_on_signal()
def main(arguments: list[str]) -> None:
    from bertjax.common.errors import UserError
    from bertjax.distributed.topology import accelerator
    from bertjax.launch.validate import validate

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; settings are given as --config.name=value")
    config = _CONFIG.value
    validate(config, with_data=False)
    target = accelerator(_TOPOLOGY.value, _SLICES.value, _HOSTS.value)
    shares = real_tokens_share(config)

    import jax

    jax.config.update("jax_platforms", "cpu")  # leave this machine's accelerators alone
    jax.config.update("jax_enable_compilation_cache", False)  # reading the cache needs the accelerator

    from bertjax.launch.start import kind_of
    from bertjax.planner import summary
    from bertjax.planner.plan import plan, settings_that_fit

    config, decisions = kind_of(config).planning.resolve(config)
    if decisions:
        print(*decisions, sep="\n", file=sys.stderr, flush=True)

    plans = plan(config, target, real_tokens_share=shares)
    print(
        summary.as_json(plans, _PRICE.value) if _JSON.value else summary.as_table(plans, target, _PRICE.value),
        flush=True,
    )
    if failing := [result for result in plans if not result.fits]:
        print("searching for settings that fit ...", file=sys.stderr, flush=True)
        found = next(settings_that_fit(config, target, [result.stage for result in failing], shares), None)
        raise UserError(summary.out_of_memory(failing, found))


def real_tokens_share(config) -> list[float]:
    """Returns the value of the flag, checked."""
    from bertjax.common.errors import UserError

    text, stages = ",".join(_SHARE.value), len(config.get("stages", ("all",)))
    try:
        shares = [float(share) for share in _SHARE.value]
    except ValueError:
        shares = [-1.0]
    if config.packing == bool(shares) and len(shares) in (0, stages) and all(0 < share <= 1 for share in shares):
        return shares
    if not config.packing:
        raise UserError(f"--real_tokens_share={text}: also set --config.packing=True, without which rows are padded")
    each = f"for each of the {stages} stages, " if stages > 1 else ""
    raise UserError(
        f"--real_tokens_share={text}: with config.packing, give one {each}above 0 and at most 1, such as "
        f"{','.join(['0.7'] * stages)}; training without packing prints it"
    )


if __name__ == "__main__":
    run_command(main)

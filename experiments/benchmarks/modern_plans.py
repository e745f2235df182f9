"""Memory and time of Ettin's 150M encoder on TPUs, by the compiler: rows of the table in docs/accelerators.md.

  python -m experiments.benchmarks.modern_plans v5litepod-16 1024     # six minutes on two cores
  python -m experiments.benchmarks.modern_plans v5litepod-16 8192 --unroll=no

Nine tenths of the tokens are real before packing. The batch of 4,608 sequences has 18 microbatches. With
8,192 tokens, a microbatch has one row per device. --microbatches sets another number. A row is one segment, the slowest
case for attention.

Needs:    no TensorFlow; libtpu
Hardware: none
Score:    MFU at 1,024 tokens by the estimate, at least 40 %
"""

import argparse

import jax

from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.stages import stages_of
from bertjax.distributed.topology import accelerator
from bertjax.planner.plan import plan

REAL_TOKENS = (0.9, 0.9, 0.9)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology")
    parser.add_argument("length", type=int, choices=(1024, 8192))
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--unroll", choices=("yes", "no"), default="yes")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="none")
    options = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    try:
        target = accelerator(options.topology)
    except UserError as error:
        parser.error(str(error))
    config = experiments.load("modern:150m")
    config.unroll, config.remat = options.unroll, options.remat
    stage = config.stages.pretraining if options.length == 1024 else config.stages.context
    stage.length = options.length
    default = 18 if options.length == 1024 else config.batch_size // len(target.devices())
    stage.microbatches = options.microbatches or default
    names = [each.name for each in stages_of(config)]
    last = len(names) - 1 - names[::-1].index("pretraining" if options.length == 1024 else "context")
    [row] = plan(config, target, [last], REAL_TOKENS)
    if row.out_of_memory:
        raise SystemExit(row.out_of_memory)
    used, available = row.hbm_used_bytes / 2**30, row.hbm_available_bytes / 2**30
    days = row.steps * row.estimated_step_seconds / 86_400
    print("| TPU | length | microbatches | HBM a chip | step | MFU | days of the stage |")
    print(
        f"| {options.topology} | {options.length:,} | {stage.microbatches} | {used:.1f} of {available:.1f} GiB"
        f" | {1e3 * row.estimated_step_seconds:,.0f} ms | {row.estimated_mfu:.1%} | {days:.1f} |"
    )


if __name__ == "__main__":
    main()

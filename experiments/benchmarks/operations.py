"""The time of a training step by operation of the model (the part of `op_name` that names modules).

On this machine, the times come from a trace of a few steps. Operations that run at the same time share the time. On a
CPU, the trace slows matrix products, on some CPUs to twice their time. Compare other operations, and time the step with
`train_step`:
  python -m experiments.benchmarks.operations finetuning:minilm:32x64
For a TPU, the times are the compiler's estimates, without the kernels (`bertjax.compile` counts the kernels). Further
columns have the limits of the data sheet: the FLOPs of products at the peak rate, the bytes of HBM at its bandwidth:
  python -m experiments.benchmarks.operations base:v5litepod-4:128

Needs:    no TensorFlow; libtpu for TPUs
Hardware: CPU
Score:    see RESULTS.md
"""

import argparse
import collections
import glob
import importlib
import re
import tempfile

STEPS = 3
COLUMNS = ("ms", "of FLOPs", "of bytes", "of either")


def traced(name: str, options) -> dict[str, tuple[float]]:
    """Returns the seconds of each operation in a step of a case of `train_step`, on this machine."""
    import jax

    from bertjax.planner.hlo import operation_of
    from experiments.benchmarks.train_step import Case, Ours

    kind, model, shape = name.split(":")
    ours = Ours(Case(kind, model, *map(int, shape.split("x")), real=0.8), options)
    ours.run(5)  # compiles
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            ours.run(STEPS)
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
    lines = ours.compiled_text().splitlines()
    found = (re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (\S+)", line) for line in lines)
    names = {each[1]: operation_of(each.string) or f"? {each[2]}" for each in found if each}
    totals: collections.Counter = collections.Counter()
    for instruction, seconds in _shares(profile).items():
        totals[names.get(instruction) or f"? {instruction.rstrip('.0123456789')}"] += seconds / STEPS
    return {operation: (seconds,) for operation, seconds in totals.items()}


def _shares(profile) -> dict[str, float]:
    """Returns the seconds of each instruction. Instructions that run at the same time share the time."""
    edges = []
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if name := dict(event.stats).get("hlo_op"):
                    edges += [(event.start_ns, 1, name), (event.start_ns + event.duration_ns, -1, name)]
    edges.sort(key=lambda edge: edge[:2])
    running: collections.Counter = collections.Counter()
    totals: collections.Counter = collections.Counter()
    last = 0
    for now, change, name in edges:
        for other in running:
            totals[other] += 1e-9 * (now - last) * running[other] / running.total()
        running[name] += change
        if not running[name]:
            del running[name]
        last = now
    return totals


def compiled(name: str, options) -> dict[str, tuple[float, ...]]:
    """Returns the seconds of each operation in a step of a shipped config on a TPU.

    The columns are the estimate, the time of FLOPs, the time of bytes, and the longer of both, summed by instruction.
    """
    import jax

    from bertjax.config.stages import stages_of
    from bertjax.distributed.mesh import make_mesh
    from bertjax.distributed.topology import accelerator
    from bertjax.planner.hlo import HloModule
    from bertjax.pretraining.compute_choice import compute_candidates
    from bertjax.pretraining.data import planned_stages
    from bertjax.pretraining.task import Pretraining
    from bertjax.training.step import Program, abstract_hyperparameters

    jax.config.update("jax_platforms", "cpu")
    experiment, *argument, topology, length = name.split(":")
    config = importlib.import_module(f"experiments.{experiment}").get_config(*argument)
    fields = (field.split("=", 1) for field in options.config)
    config.update_from_flattened_dict({name: int(value) if value.isdecimal() else value for name, value in fields})
    chips = accelerator(topology)
    config = next(compute_candidates(config, "tpu", chips.generation.kind))  # the fastest, even if it does not fit
    mesh = make_mesh(config, chips.devices())
    task = Pretraining(config, mesh, planned_stages(config, mesh))
    program = Program(task, config, mesh)
    lengths = [stage.length for stage in stages_of(config)]
    if int(length) not in lengths:
        raise SystemExit(f"{name}: experiments/{experiment}.py has stages of lengths {lengths}")
    stage = len(lengths) - 1 - lengths[::-1].index(int(length))  # the last stage of this length, with the full batch
    train_step = program.step_of(*task.loss_and_config(stages_of(config)[stage].first_step))
    batch = task.data[stage].abstract_batch()
    lowered = train_step.lower(program.state, batch, abstract_hyperparameters(config, mesh))
    rate = chips.generation
    peak, bandwidth = (each / rate.devices_per_chip for each in (rate.peak_flops, rate.hbm_bandwidth))
    found: dict[str, tuple[float, ...]] = {}
    for each in HloModule(lowered.compile().as_text()).estimates():
        of_flops, of_bytes = each.flops / peak, each.bytes / bandwidth
        own = each.cycles / rate.clock, of_flops, of_bytes, max(of_flops, of_bytes)
        before = found.get(each.operation, (0.0,) * len(own))
        found[each.operation] = tuple(a + each.times * b for a, b in zip(before, own))
    return found


def short(operation: str) -> str:
    """Keeps the direction and the path within a layer: "backward layers/output.product/dot_general"."""
    if "jvp(" not in operation:
        return operation.removeprefix("jit(train_step)/") or "?"
    way = "backward" if "transpose(" in operation else "forward"
    return f"{way} {operation.rpartition('encoder/')[2].rpartition('closed_call/')[2].removeprefix('jit(train_step)/')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", help="KIND:MODEL:SEQUENCESxLENGTH here, or EXPERIMENT[:ARGUMENT]:TOPOLOGY:LENGTH")
    parser.add_argument("--config", action="append", default=[], help="FIELD=VALUE of the config, such as remat=full")
    parser.add_argument("--rows", type=int, default=40, help="number of rows of the table, largest first")
    options = parser.parse_args()

    if re.fullmatch(r"(pretraining|finetuning):[\w-]+:\d+x\d+", options.step):
        seconds = traced(options.step, options)
    elif re.fullmatch(r"\w+(:\w+)?:[\w-]+:\d+", options.step):
        seconds = compiled(options.step, options)
    else:
        parser.error(f"{options.step}: write KIND:MODEL:SEQUENCESxLENGTH, or EXPERIMENT:TOPOLOGY:LENGTH")
    found: dict[str, tuple[float, ...]] = {}
    for operation, each in seconds.items():
        found[short(operation)] = tuple(map(sum, zip(each, found.get(short(operation), (0.0,) * len(each)))))
    columns = COLUMNS[: len(next(iter(found.values())))]
    whole = [1000 * sum(each) for each in zip(*found.values())]
    print(f"{whole[0]:.1f} ms a step" + "".join(f"; {ms:.1f} {name}" for ms, name in zip(whole[1:], columns[1:])))
    print(f"\n| {' | '.join(columns)} | share | operation |\n|{'---|' * (len(columns) + 2)}")
    for operation, each in sorted(found.items(), key=lambda item: -item[1][0])[: options.rows]:
        numbers = " | ".join(f"{1000 * value:.2f}" for value in each)
        print(f"| {numbers} | {1000 * each[0] / whole[0]:.1%} | {operation} |")


if __name__ == "__main__":
    main()

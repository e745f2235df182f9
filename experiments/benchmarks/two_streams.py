"""A training step of permuted words (XLNet) beside one of masked words (BERT), of the same sizes and predictions.

Each predicts one in six of all tokens. XLNet's second stream has the predicted tokens only; what it costs besides are
scores of distances and segments. Rounds of both take turns, of batches that are made up. The goal is 2.2 times at most.

Command:  python -m experiments.benchmarks.two_streams --model=4-512-8 --batch=8 --length=128
Hardware: any CPU that does nothing else; a few minutes
Results:  RESULTS.md
"""

import argparse
import itertools
import json
import statistics
import time

import numpy as np

K, VOCABULARY, BATCHES = 6, 8000, 4
SIDES = {"masked": ("bert", "mlm"), "permuted": ("xlnet", "plm")}


def make_config(side: str, model: str, batch: int, length: int, dtype: str):
    from bertjax.config.defaults import named_stages, pretraining_config, stage
    from bertjax.config.model_config import model_size
    from bertjax.models import families

    (family, objective), config = SIDES[side], pretraining_config()
    longest = {"max_position_embeddings": max(512, length)}
    config.model = families.model_fields(family, vocab_size=VOCABULARY, **model_size(model), **longest)
    config.objective, config.batch_size, config.dtype = objective, batch, dtype
    config.stages = named_stages(only=stage(1000, length, length // K))
    config.data.masking = "dynamic"
    return config


def make_batch(side: str, rng: np.random.Generator, batch: int, length: int) -> dict[str, np.ndarray]:
    shape, words = (batch, length), (batch, length // K)
    chosen = rng.permuted(np.tile(np.arange(length), (batch, 1)), axis=1)[:, : words[1]]  # in their order
    ids, ranks = rng.integers(5, VOCABULARY, shape), np.zeros(shape)
    np.put_along_axis(ranks, chosen, 1 + np.arange(words[1]), axis=1)
    positions = np.sort(chosen)
    batch = {
        "input_ids": ids,
        "segments": np.ones(shape),
        "token_types": np.tile(np.arange(length) >= length // 2, (batch, 1)),
        "word_positions": positions,
        "word_ids": np.take_along_axis(ids, positions, axis=1),
        "pair_labels": np.zeros(batch),
    }
    batch |= {"ranks": ranks} if side == "permuted" else {}
    ones = {"word_weights": np.ones(words, np.float32), "sequence_weights": np.ones(len(ids), np.float32)}
    return {name: x.astype(np.int32) for name, x in batch.items()} | ones


def rounds(side: str, steps: int, arguments):
    """Yields the seconds of a step, the mean of a round; the first round compiles."""
    import jax

    from bertjax.distributed.mesh import make_mesh, put_batch
    from bertjax.pretraining.data import planned_stages
    from bertjax.pretraining.task import Pretraining
    from bertjax.training.optim.schedules import schedule_of
    from bertjax.training.step import Program, put_hyperparameters

    sizes = arguments.batch, arguments.length
    config, rng = make_config(side, arguments.model, *sizes, arguments.dtype), np.random.default_rng(0)
    mesh = make_mesh(config)
    task = Pretraining(config, mesh, planned_stages(config, mesh))
    program = Program(task, config, mesh)
    recipe = put_hyperparameters(0, schedule_of(config, task.total_steps), mesh)
    state = program.init(jax.random.key(0))
    batches = itertools.cycle([put_batch(make_batch(side, rng, *sizes), mesh) for _ in range(BATCHES)])
    while True:
        began = time.monotonic()
        for batch in itertools.islice(batches, steps):
            state, metrics = program.train_step(state, batch, recipe)
        assert np.isfinite(float(metrics["loss"]))  # waits
        yield (time.monotonic() - began) / steps, task.flops(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="4-512-8")
    parser.add_argument("--batch", default=8, type=int)
    parser.add_argument("--length", default=128, type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--steps", default=10, type=int, help="of a round")
    arguments = parser.parse_args()

    from bertjax.distributed.mesh import use_cpu_cores

    use_cpu_cores(make_config("masked", arguments.model, arguments.batch, arguments.length, arguments.dtype))
    sides = {side: rounds(side, arguments.steps, arguments) for side in SIDES}
    for side in sides.values():
        next(side)
    found = {side: [] for side in sides}
    for _ in range(arguments.rounds):
        for side, each in sides.items():
            found[side].append(next(each))
    first = statistics.median(seconds for seconds, _ in found["masked"])
    for side, each in found.items():
        seconds, flops = [seconds for seconds, _ in each], each[0][1]
        middle = statistics.median(seconds)
        result = dict(side=side, seconds=middle, least=min(seconds), most=max(seconds), gigaflops=flops / 1e9)
        print(json.dumps(result | {"times": middle / first}), flush=True)


if __name__ == "__main__":
    main()

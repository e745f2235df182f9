"""Training steps of permuted words (XLNet) and of masked words (BERT), with the same sizes and predictions.

Both models predict one in six of all tokens. XLNet's second stream has the predicted tokens only. Scores of distances
and segments cost additional time. Rounds of both models alternate, on random batches. The goal is at most 2.2 times.

Command:  python -m experiments.benchmarks.two_streams --model=4-512-8 --batch=8 --length=128
Hardware: any idle CPU; a few minutes
Results:  RESULTS.md
"""

import argparse
import itertools
import json

import numpy as np

from experiments.benchmarks.timing import Steps, in_turns, seconds_of, summary

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
    chosen = rng.permuted(np.tile(np.arange(length), (batch, 1)), axis=1)[:, : words[1]]  # in order of prediction
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


def round_of(side: str, steps: int, arguments):
    """Returns a function that runs a round and returns the mean seconds per step, and the FLOPs of a step."""
    from bertjax.distributed.mesh import make_mesh
    from bertjax.pretraining.data import planned_stages
    from bertjax.pretraining.task import Pretraining

    sizes = arguments.batch, arguments.length
    config, rng = make_config(side, arguments.model, *sizes, arguments.dtype), np.random.default_rng(0)
    mesh = make_mesh(config)
    task = Pretraining(config, mesh, planned_stages(config, mesh))
    train = Steps(task)
    batches = itertools.cycle([train.put(make_batch(side, rng, *sizes)) for _ in range(BATCHES)])

    def run() -> None:
        for batch in itertools.islice(batches, steps):
            metrics = train(batch)
        assert np.isfinite(float(metrics["loss"]))  # waits for the step

    return lambda: seconds_of(run) / steps, task.flops(0, 1)


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
    sides = {side: round_of(side, arguments.steps, arguments) for side in SIDES}
    runs = {side: run for side, (run, _) in sides.items()}
    in_turns(runs, 1)  # compiles
    results = {side: summary(seconds) for side, seconds in in_turns(runs, arguments.rounds).items()}
    for side, result in results.items():
        more = dict(gigaflops=sides[side][1] / 1e9, times=result["seconds"] / results["masked"]["seconds"])
        print(json.dumps({"side": side, **result, **more}), flush=True)


if __name__ == "__main__":
    main()

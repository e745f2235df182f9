"""A training step of embeddings in bertjax and in sentence-transformers' trainer: the same weights and examples.

Data: squad, questions and their paragraphs; short, the pairs of STS-B. A round is an epoch of the same examples on each
side; the sides alternate. Padded batches are the same in both libraries. Packed batches group the same examples
differently. The times include making batches, and in sentence-transformers tokenization, which its trainer does in each
step.

Command:  python -m experiments.benchmarks.vectors_step --weights=DIR --data=DATA
          DIR and DATA as in vectors.py
Needs:    pip install torch sentence-transformers datasets
Hardware: 2 CPU cores, half an hour
Results:  RESULTS.md
"""

import argparse
import json
import pathlib
import tempfile

from experiments.benchmarks import vectors
from experiments.benchmarks.timing import epoch_timer, in_turns, summary

KINDS = {"squad": ("squad", {}), "short": ("stsb", {"data.form": "pairs", "batch_size": 64, "epochs": 1.0})}
SIDES = {
    "bertjax": {},
    "bertjax packed": {"packing": True},
    "bertjax packed, dtype=auto": {"packing": True, "dtype": "auto"},
}
THEIRS = "sentence-transformers"


def make_config(kind: str, weights: str, folder: pathlib.Path, **changes):
    name, settings = KINDS[kind]
    config = vectors.make_config(name, weights, folder, seed=0)
    config.update_from_flattened_dict(settings | {"packing": False} | changes)
    return config


def round_of_ours(config, folder: pathlib.Path):
    """Returns a function that trains an epoch from the initial params, and returns the seconds per step."""
    from bertjax.finetuning import run as finetuning_run

    config, _ = finetuning_run.resolve(config, None)
    return epoch_timer(finetuning_run.KIND.open(config, folder, None))


def round_of_theirs(config, folder: pathlib.Path):
    """Like `round_of_ours`, on the batches of bertjax; the first step of each round is left out."""
    from sentence_transformers.base.sampler import DefaultBatchSampler

    from bertjax.data.loading.examples import TrainingOrder
    from bertjax.finetuning import run as finetuning_run

    config, _ = finetuning_run.resolve(config, None)
    train = finetuning_run.load_inputs(config, None, None).data.train
    order = TrainingOrder(train, config.batch_size, config.seed, config.model.max_position_embeddings)

    class SameBatches(DefaultBatchSampler):
        def __iter__(self):
            for step in range(order.steps_per_epoch):
                yield [int(row) for row in order.rows(step) if row >= 0]

    return lambda: float(vectors.train_theirs(config, folder, SameBatches)[1].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--examples", default=1280, type=int)
    parser.add_argument("--rounds", default=5, type=int)
    arguments = parser.parse_args()

    from bertjax.distributed.mesh import use_cpu_cores

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        sizes = vectors.SIZES | {"examples": arguments.examples}
        vectors.write_data(arguments.data.resolve(), folder, sizes, rows=[])
        for kind in arguments.kinds.split(","):
            use_cpu_cores(make_config(kind, arguments.weights, folder))
            sides = {THEIRS: round_of_theirs(make_config(kind, arguments.weights, folder), folder)}
            for name, changes in SIDES.items():
                sides[name] = round_of_ours(make_config(kind, arguments.weights, folder, **changes), folder)
            in_turns(sides, 1)  # compiles
            results = {name: summary(seconds) for name, seconds in in_turns(sides, arguments.rounds).items()}
            for name, result in results.items():
                times = results[THEIRS]["seconds"] / result["seconds"]
                print(json.dumps({"data": kind, "by": name, **result, "times": times}), flush=True)


if __name__ == "__main__":
    main()

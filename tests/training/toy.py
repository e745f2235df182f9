"""A task for tests of the loop that compiles in a moment: a line through points."""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from bertjax.distributed.mesh import local_rows
from bertjax.training.scores import Scores
from tests.conftest import one_device_mesh, tiny_config


def toy_config(**fields):
    """Ten steps; logs every second step, evaluates and saves every fifth step."""
    config = tiny_config("unused")
    config.update(fields)
    return config


class Toy:
    """Fits a line.

    `scores`: the scores of consecutive evaluations, which rank the checkpoints; None: no held-out data.
    """

    total_steps, carry = 10, None

    def __init__(self, config, mesh=None, scores=(1.0,) * 5, measured_on=""):
        self.config, self.mesh = config, mesh or one_device_mesh(config)
        self.scores = iter(scores) if scores is not None else None
        self.measured_on, self.evaluated = measured_on, []

    def init_params(self, key):
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("embed", None))
        return {"dense": {"kernel": zeros(key, (3, 1)), "bias": jnp.zeros(1)}}

    def is_frozen(self, path):
        return False

    def layer_ids(self, path):
        return None

    def batches(self, start_step):
        rows_of_host = local_rows(self.mesh, self.config.batch_size)
        for step in range(start_step, self.total_steps):
            x = np.random.default_rng(step).normal(size=(self.config.batch_size, 3)).astype(np.float32)
            yield {"x": x[rows_of_host], "y": x.sum(1)[rows_of_host], "weights": np.ones(len(rows_of_host), np.float32)}

    def loss_and_config(self, step):
        return self, self.config

    def mask_updates(self, updates, step):
        return updates

    def normalize(self, batch):
        return {**batch, "weights": batch["weights"] / batch["weights"].sum()}

    def cast(self, params):
        return params

    def __call__(self, params, batch, dropout_keys=None):
        guess = (batch["x"] @ params["dense"]["kernel"])[:, 0] + params["dense"]["bias"]
        return (batch["weights"] * jnp.square(guess - batch["y"])).sum(), {
            "tokens": jnp.float32(1),
            "padding": jnp.float32(0),
        }

    @property
    def evaluator(self):
        return self

    def run(self, params, step, after_batch=lambda: None):
        if self.scores is None:
            return None
        self.evaluated.append(step)
        for _ in range(3):
            after_batch()
        score = next(self.scores)
        return Scores({"score": score}, score, self.measured_on, decided={"threshold": math.pi})

    def files(self):
        return {"predictions.json": f"{self.evaluated[-1]}\n"}

    def flops(self, start, stop):
        return stop - start

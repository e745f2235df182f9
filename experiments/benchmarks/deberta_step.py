"""Forward and backward pass of a DeBERTa with masked tokens, in bertjax and in transformers (torch eager).

Both libraries read the same weights and the same batch, in float32, and compute logits at the predicted tokens only.
Each library has a separate process. One process waits while the other process computes: the rounds alternate. The table
has the least seconds of all rounds, because other work on the machine only adds time. The losses without dropout are
compared first.

Command:  python -m experiments.benchmarks.deberta_step --buckets=64,256 --length=512 --batch=2 --rounds=5
Needs:    pip install torch transformers
Hardware: any CPU; a few minutes
Score:    see RESULTS.md
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import tempfile

import numpy as np

from experiments.benchmarks.timing import seconds_of, summary, table_header, table_row

SIDES = ("bertjax", "transformers")


def make_folder(folder: pathlib.Path, arguments, buckets: int) -> None:
    """Writes a folder of transformers with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    layers, hidden, heads = map(int, arguments.model.split("-"))
    config = transformers.DebertaV2Config(
        vocab_size=arguments.vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden, max_position_embeddings=512, type_vocab_size=0, relative_attention=True,
        position_buckets=buckets, max_relative_positions=-1, pos_att_type=["p2c", "c2p"], share_att_key=True,
        norm_rel_ebd="layer_norm", position_biased_input=False, layer_norm_eps=1e-7, pad_token_id=0,
        hidden_dropout_prob=arguments.dropout, attention_probs_dropout_prob=arguments.dropout,
    )  # fmt: skip
    transformers.DebertaV2ForMaskedLM(config).save_pretrained(folder)


def make_batch(arguments) -> dict[str, np.ndarray]:
    rng, shape = np.random.default_rng(0), (arguments.batch, arguments.length)
    ids = rng.integers(5, arguments.vocabulary, shape)
    count = round(0.15 * arguments.length)
    places = np.sort(rng.permuted(np.tile(np.arange(arguments.length), (arguments.batch, 1)), axis=1)[:, :count])
    words = rng.integers(5, arguments.vocabulary, places.shape)
    return {name: x.astype(np.int32) for name, x in dict(ids=ids, places=places, words=words).items()}


class Ours:
    def __init__(self, folder: str, batch: dict, arguments):
        import jax
        import jax.numpy as jnp
        import optax

        from bertjax.config.defaults import pretraining_config
        from bertjax.config.model_config import Compute
        from bertjax.distributed.mesh import use_cpu_cores
        from bertjax.interop.pretrained import read_pretrained
        from bertjax.models.heads import BertForMaskedLM

        use_cpu_cores(pretraining_config())
        source = read_pretrained(folder)
        model = BertForMaskedLM(source.config, Compute(chip="cpu"))
        self.params = jax.device_put({name: source.params[name] for name in ("bert", "masked_lm")})
        ids, places, words = (jnp.asarray(batch[name]) for name in ("ids", "places", "words"))

        def loss(params, keys):
            inputs = ids, jnp.ones_like(ids), jnp.zeros_like(ids), places, keys
            logits = model.apply({"params": params}, *inputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()

        self._loss, self._step = jax.jit(loss), jax.jit(jax.value_and_grad(loss))
        self._keys = jax.random.split(jax.random.key(0), len(ids)) if arguments.dropout else None

    def loss(self) -> float:
        """Returns the loss without dropout."""
        return float(self._loss(self.params, None))

    def step(self) -> None:
        """Computes the loss and the gradient."""
        import jax

        jax.block_until_ready(self._step(self.params, self._keys))


class Theirs:
    def __init__(self, folder: str, batch: dict, arguments):
        import torch
        import transformers

        torch.set_num_threads(arguments.threads)
        self.model = transformers.DebertaV2ForMaskedLM.from_pretrained(folder, dtype=torch.float32)
        self.batch = {name: torch.from_numpy(x).long() for name, x in batch.items()}

    def loss_of(self):
        import torch

        ids, places, words = self.batch.values()
        hidden = self.model.deberta(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        predicted = torch.gather(hidden, 1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = self.model.cls(predicted)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())

    def loss(self) -> float:
        """Returns the loss without dropout."""
        import torch

        with torch.no_grad():
            loss = float(self.model.eval() and self.loss_of())
        self.model.train()
        return loss

    def step(self) -> None:
        """Computes the loss and the gradient."""
        self.model.zero_grad(set_to_none=True)
        self.loss_of().backward()


def serve(connection, side: str, folder: str, batch: dict, arguments) -> None:
    """Answers the requests of the main process: "loss", "seconds" of a step, and "end"."""
    model = {"bertjax": Ours, "transformers": Theirs}[side](folder, batch, arguments)
    loss = model.loss()
    model.step()  # compiles
    connection.send(loss)
    while connection.recv() != "end":
        connection.send([seconds_of(model.step) for _ in range(arguments.steps)])


def measure(folder: str, arguments) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Returns the losses, and the seconds of all steps, of both libraries."""
    context, batch = multiprocessing.get_context("spawn"), make_batch(arguments)
    connections, losses, seconds = {}, {}, {side: [] for side in SIDES}
    processes = []
    for side in SIDES:
        connections[side], other = context.Pipe()
        process = context.Process(target=serve, args=(other, side, folder, batch, arguments), daemon=True)
        process.start()
        processes.append(process)
        losses[side] = connections[side].recv()
    for _ in range(arguments.rounds):
        for side, connection in connections.items():
            connection.send("seconds")
            seconds[side] += connection.recv()
    for process, connection in zip(processes, connections.values()):
        connection.send("end")
        process.join()
    return losses, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="6-256-4", help="LAYERS-HIDDEN-HEADS")
    parser.add_argument("--buckets", default="64,256")
    parser.add_argument("--batch", default=2, type=int)
    parser.add_argument("--length", default=512, type=int)
    parser.add_argument("--vocabulary", default=8000, type=int)
    parser.add_argument("--dropout", default=0.1, type=float)
    parser.add_argument("--threads", default=os.cpu_count(), type=int, help="of torch; bertjax has all cores")
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--steps", default=3, type=int, help="of a round")
    arguments = parser.parse_args()
    rows = []
    for buckets in map(int, arguments.buckets.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            make_folder(pathlib.Path(folder), arguments, buckets)
            losses, seconds = measure(folder, arguments)
        results = {side: summary(values) for side, values in seconds.items()}
        print(json.dumps({"buckets": buckets, "losses": losses, **results}), flush=True)
        assert abs(losses["bertjax"] - losses["transformers"]) < 1e-4, losses
        least = [results[side]["least"] for side in SIDES]
        rows.append([buckets, *(f"{x:.3f}" for x in least), f"{least[1] / least[0]:.2f}"])
    names = [f"least seconds, {side}" for side in SIDES]
    print(table_header(["buckets", *names, "transformers / bertjax"]))
    print("\n".join(map(table_row, rows)))


if __name__ == "__main__":
    main()

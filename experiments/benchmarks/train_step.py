"""Seconds of a training step in bertjax and in transformers (torch): the same shapes, in alternating rounds.

A step is the whole step: dropout .1, forward, backward, clipping by the global norm, AdamW. bertjax's step is timed in
the training loop, from batches on the host, with two steps in flight. Each library has a separate process with separate
memory and threads. One process waits while the other process computes. Batches are random.

Command:  python -m experiments.benchmarks.train_step
          --cases=pretraining:small:8x128,finetuning:minilm:32x64 (kind:model:sequences x length) --output=steps.jsonl
          packed:small:8x128 is pre-training on the same sequences, in fewer rows in bertjax
Needs:    for the comparison, pip install torch transformers; without them, only bertjax is timed. No TensorFlow.
Hardware: CPU: float32, and bfloat16 where the processor multiplies it (torch: autocast), torch eager.
          GPU: bfloat16, torch.compile, SDPA, fused AdamW
Score:    see RESULTS.md

`rate` is the rate of the machine's matrix products of a type: the fastest of several BERT shapes and both libraries.
`MFU` is the model's FLOPs by bertjax's count (masked-LM logits at masked positions only), as a share of this rate.
`time / ours` compares with bertjax's step of the same type, `float32 / this` with the same library's step in float32.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import platform
import re
import statistics
import time

import numpy as np

from experiments.benchmarks.timing import Steps, seconds_of, summary, table_header, table_row

CASES = "pretraining:small:8x128," + ",".join(f"finetuning:minilm:32x{length}" for length in (16, 64, 128, 384))
MINILM = dict(num_hidden_layers=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536, hidden_act="gelu")
PRODUCTS = ((4096, 768, 3072), (4096, 3072, 768), (4096, 1024, 1024), (1024, 512, 2048), (8192, 1024, 4096))
LARGE_PRODUCTS = ((16384, 1024, 4096), (16384, 4096, 4096), (8192, 8192, 8192))  # smaller products do not fill a GPU
BATCHES = 8  # different batches, alternating
VOCABULARY = 30522


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str  # pretraining | packed | finetuning
    model: str  # minilm, a key of `config.SIZES`, or modern-SIZE of experiments/modern.py
    sequences: int
    length: int
    real: float  # share of tokens that are not padding

    @property
    def name(self) -> str:
        return f"{self.kind} {self.model} {self.sequences} x {self.length}"

    def config(self):
        from bertjax.config import defaults as configs
        from bertjax.config import model_config

        if self.model.startswith("modern-"):
            return self._modern(configs)
        size = MINILM if self.model == "minilm" else model_config.model_size(self.model)
        if self.kind != "finetuning":
            config = configs.pretraining_config()
            config.stages = configs.named_stages(only=configs.stage(1000, self.length, math.ceil(0.15 * self.length)))
        else:
            config = configs.fine_tuning_config("classify")
            config.epochs = 1000.0
        config.model.update(size)
        config.update(batch_size=self.sequences, packing=self.kind == "packed")
        return config

    def _modern(self, configs):
        """Returns the config of a ModernBERT without dropout, because transformers' ModernBERT has no dropout."""
        from bertjax.models.families import model_fields
        from experiments.modern import get_config

        config = get_config(self.model.removeprefix("modern-"))
        with config.unlocked():
            fields = config.model.to_dict() | dict(attention_output_dropout_prob=0.0, vocab_size=VOCABULARY)
            config.model = model_fields(**fields)
            config.stages = configs.named_stages(only=configs.stage(1000, self.length, math.ceil(0.15 * self.length)))
            config.data.masking = "static"  # batches are random
        config.update(batch_size=self.sequences, packing=self.kind == "packed")
        return config

    def lengths(self, rng) -> np.ndarray:
        """Returns the real tokens of each sequence, spread evenly around the share `real`; one sequence is full."""
        least = max(4, round((2 * self.real - 1) * self.length))
        lengths = np.linspace(least, self.length, self.sequences).round().astype(int)
        return rng.permutation(lengths)

    def batches(self) -> list[dict]:
        rng = np.random.default_rng(0)
        return [self._batch(rng, VOCABULARY) for _ in range(BATCHES)]

    def packed(self, config) -> list[dict]:
        """Returns the same sequences of all batches, packed into rows."""
        from bertjax.config.stages import stages_of
        from bertjax.data.batch import RECORD_ARRAYS
        from bertjax.data.loading.packing import arrange, pack
        from bertjax.pretraining.data import packed_row_size

        batches, row, spec = self.batches(), packed_row_size(config, *stages_of(config)), RECORD_ARRAYS.packed()
        every = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        lengths = (every["segments"] > 0).sum(1)
        order, rows, starts, count = arrange(lengths, self.sequences, row, np.random.default_rng(0))
        return [
            pack({name: x[own] for name, x in every.items()}, spec, own, *where, count, row)
            for own, *where in zip(order, rows, starts)
        ]

    def _batch(self, rng, vocabulary: int) -> dict:
        shape, lengths = (self.sequences, self.length), self.lengths(rng)
        mask = (np.arange(self.length) < lengths[:, None]).astype(np.int32)
        batch = {"input_ids": rng.integers(1000, vocabulary, shape).astype(np.int32) * mask, "segments": mask}
        types = (np.arange(self.length) >= lengths[:, None] // 2).astype(np.int32) * mask
        labels, ones = rng.integers(0, 2, self.sequences).astype(np.int32), np.ones(self.sequences, np.float32)
        if self.kind == "finetuning":
            return {**batch, "token_types": types, "labels": labels, "weights": ones}
        most = math.ceil(0.15 * self.length)
        positions, weights = np.zeros((self.sequences, most), np.int32), np.zeros((self.sequences, most), np.float32)
        for row, length in enumerate(lengths):
            count = max(1, round(0.15 * length))
            positions[row, :count] = np.sort(rng.choice(length, count, replace=False))
            weights[row, :count] = 1
        ids = rng.integers(1000, vocabulary, positions.shape).astype(np.int32)
        batch |= {"token_types": types, "word_positions": positions, "word_ids": ids}
        return {
            **batch,
            "word_weights": weights,
            "pair_labels": labels,
            "sequence_weights": ones,
        }


class Ours:
    def __init__(self, case: Case, options, dtype: str = "auto"):
        import jax

        from bertjax.distributed.mesh import make_mesh, use_cpu_cores

        self.config, self.case = case.config(), case
        self.config.dtype = self.type = dtype
        self.config.update_from_flattened_dict(dict(field.split("=", 1) for field in options.config))
        use_cpu_cores(self.config)
        self.mesh = make_mesh(self.config)
        batches = case.packed(self.config) if case.kind == "packed" else case.batches()
        self.task = self._task(rows=len(batches[0]["input_ids"]))
        self._train = Steps(self.task)
        self._batches = itertools.cycle(batches)
        self.device = f"{len(jax.devices())} x {jax.devices()[0].device_kind}"

    def _task(self, rows: int):
        if self.case.kind != "finetuning":
            from bertjax.pretraining.data import planned_stages
            from bertjax.pretraining.task import Pretraining

            return Pretraining(self.config, self.mesh, planned_stages(self.config, self.mesh, [rows]))
        from bertjax.config.resolved import ResolvedConfig
        from bertjax.data.loading.examples import Examples
        from bertjax.finetuning.task import FineTuning
        from bertjax.inference.heads import ClassificationHead
        from bertjax.inference.task import TaskData

        ids = [np.zeros(self.case.length, np.int32)] * self.case.sequences  # only the lengths are used
        examples = Examples(ids, ids, [0] * len(ids))
        data = TaskData(ClassificationHead(2), ("a", "b"), examples, (), "accuracy")
        return FineTuning(ResolvedConfig.copy_of(self.config), self.mesh, data)

    def run(self, steps: int) -> None:
        """Runs the body of `training.loop.train` without reports."""
        from bertjax.training.loop import STEPS_IN_FLIGHT

        pending, batch = [], self._train.put(next(self._batches))
        for _ in range(steps):
            ahead = self._train.put(next(self._batches))
            metrics = self._train(batch)
            batch = ahead
            pending.append(metrics["loss"])
            if len(pending) > STEPS_IN_FLIGHT:
                pending[-1 - STEPS_IN_FLIGHT].block_until_ready()
        self._train.state.step.block_until_ready()
        assert np.isfinite(pending[-1])

    def compiled_text(self) -> str:
        """Returns the compiled program of a step."""
        return self._train.compiled_text(self._train.put(next(self._batches)))

    def product(self, m: int, k: int, n: int):
        import jax
        import jax.numpy as jnp

        a, b = (jax.random.normal(jax.random.key(0), shape, self.type) for shape in ((m, k), (k, n)))
        dot = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
        return lambda: dot(a, b).block_until_ready()

    def memory(self) -> int | None:
        """Returns the peak memory of the device, or None on a CPU, where the memory of the process counts."""
        import jax

        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    def about(self) -> dict:
        return {"flops": self.task.flops(0, 1), "device": self.device}


class Theirs:
    def __init__(self, case: Case, options, dtype: str):
        import torch

        self.type, self.cuda = getattr(torch, dtype), torch.cuda.is_available()
        self.modern = case.model.startswith("modern-")
        self.device = torch.device("cuda" if self.cuda else "cpu")
        torch.manual_seed(0)
        self.model = self._model(case).to(self.device).train()
        self.params = list(self.model.parameters())
        is_matrix = [p.ndim > 1 for p in self.params]
        groups = [
            {"params": list(itertools.compress(self.params, is_matrix)), "weight_decay": 0.01},
            {"params": [p for p in self.params if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, eps=1e-6, fused=self.cuda)
        if options.compile == "yes" or (options.compile == "auto" and self.cuda):
            self.model = torch.compile(self.model)
        self._batches = itertools.cycle([self._translate(batch) for batch in case.batches()])

    def _model(self, case: Case):
        import transformers

        ours = case.config().model
        if ours.family == "modernbert":
            from bertjax.models import families
            from bertjax.models.modernbert.huggingface import FORMAT

            fields = FORMAT.to_fields(families.config_of(case.config())) | dict(pad_token_id=0, sparse_prediction=True)
            config = transformers.ModernBertConfig(**fields, attn_implementation="sdpa")
            return transformers.ModernBertForMaskedLM(config)
        model = ours.to_dict()
        if model["hidden_act"] == "gelu_new":
            model["hidden_act"] = "gelu_pytorch_tanh"  # the same function, faster
        config = transformers.BertConfig(**model, num_labels=2, attn_implementation="sdpa")
        head = "BertForSequenceClassification" if case.kind == "finetuning" else "BertForPreTraining"
        return getattr(transformers, head)(config)

    def _translate(self, batch: dict) -> dict:
        """Renames the arrays of a batch for transformers, on the host."""
        import torch

        names = {"input_ids": "input_ids", "segments": "attention_mask"}
        names |= {"token_types": "token_type_ids", "labels": "labels", "pair_labels": "next_sentence_label"}
        out = {theirs: torch.from_numpy(batch[ours]).long() for ours, theirs in names.items() if ours in batch}
        if "word_ids" in batch:
            labels, chosen = np.full(batch["input_ids"].shape, -100), batch["word_weights"] > 0
            rows = np.nonzero(chosen)[0]
            labels[rows, batch["word_positions"][chosen]] = batch["word_ids"][chosen]
            out["labels"] = torch.from_numpy(labels).long()
        if self.modern:
            out = {name: x for name, x in out.items() if name in ("input_ids", "attention_mask", "labels")}
        return out

    def run(self, steps: int) -> None:
        import torch

        for _ in range(steps):
            batch = {name: x.to(self.device, non_blocking=True) for name, x in next(self._batches).items()}
            with torch.autocast(self.device.type, self.type, enabled=self.type != torch.float32):
                loss = self.model(**batch).loss
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
            self.optimizer.step()
        assert math.isfinite(loss.item())  # waits for the device

    def product(self, m: int, k: int, n: int):
        import torch

        a, b = (torch.randn(shape, dtype=self.type, device=self.device) for shape in ((m, k), (k, n)))

        def run():
            a @ b
            if self.cuda:
                torch.cuda.synchronize()

        return run

    def memory(self) -> int | None:
        import torch

        return torch.cuda.max_memory_allocated() if self.cuda else None

    def about(self) -> dict:
        return {}


def serve(side: type, dtype: str, case: Case, options, pipe) -> None:
    """Runs the process of a side: answers each (method, arguments) with the result and the seconds."""
    subject, refs = side(case, options, dtype), pathlib.Path("/proc/self/clear_refs")
    subject.run(4)  # compiles
    if refs.exists():
        refs.write_text("5")  # resets the peak of the compilation

    def steps(count: int) -> float:
        return seconds_of(lambda: subject.run(count)) / count

    def flops_per_second(m: int, k: int, n: int) -> float:
        product, times = subject.product(m, k, n), []
        while len(times) < 3 or sum(times) < 0.3:
            times.append(seconds_of(product))
        return 2 * m * k * n / min(times)

    def memory() -> int:
        peak = re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())
        return subject.memory() or int(peak[1]) * 1024

    methods = {f.__name__: f for f in (steps, flops_per_second, memory)} | {"about": subject.about}
    while (request := pipe.recv()) is not None:
        pipe.send(methods[request[0]](*request[1:]))


class Side:
    """The parent's end of a side's process."""

    def __init__(self, side: type, dtype: str, case: Case, options):
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(side, dtype, case, options, theirs), daemon=True)
        self._process.start()
        theirs.close()  # else the parent would wait for a dead process
        self.times: list[float] = []

    def __call__(self, *request):
        self._pipe.send(request)
        return self._pipe.recv()

    def round(self, seconds: float) -> None:
        estimate = statistics.median(self.times) if self.times else self("steps", 2)
        self.times.append(self("steps", max(2, round(seconds / estimate))))

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def measure(case: Case, options, names: dict[str, type], dtypes: list[str]) -> list[dict]:
    """Returns the results of each side and type, after alternating rounds."""
    from bertjax.distributed.topology import has_accelerator

    sides = {}
    for dtype, name in itertools.product(dtypes, names):
        sides[dtype, name] = Side(names[name], dtype, case, options)
        sides[dtype, name]("about")  # waits for the compilation, so only one side compiles at a time
    products = PRODUCTS + (LARGE_PRODUCTS if has_accelerator() else ())
    rates = {
        dtype: max(sides[dtype, name]("flops_per_second", *shape) for shape in products for name in names)
        for dtype in dtypes
    }
    for _ in range(options.rounds):
        for side in sides.values():
            side.round(options.seconds)
    tokens = statistics.mean(int(batch["segments"].sum()) for batch in case.batches())
    results = []
    for (dtype, name), side in sides.items():
        ours, rate = sides[dtype, "bertjax"], rates[dtype]
        about, result = ours("about"), dict(case=case.name, by=name, type=dtype, **summary(side.times))
        seconds = result["seconds"]
        result |= dict(sequences_per_second=case.sequences / seconds, tokens_per_second=tokens / seconds)
        result |= dict(mfu=about["flops"] / seconds / rate, rate=rate, memory=side("memory"), rounds=options.rounds)
        result |= dict(ratio=_ratio(side, ours), device=about["device"])
        if "float32" in dtypes:
            result["gain"] = _ratio(sides["float32", name], side)
        results.append(result)
    for side in sides.values():
        side.close()
    return results


def _ratio(side: Side, other: Side) -> float:
    """Returns the median ratio of neighbouring rounds, so a slow period of the machine affects both sides."""
    return statistics.median(mine / its for mine, its in zip(side.times, other.times))


def row(result: dict) -> str:
    cells = [result["case"], result["by"], result["type"], f"{1000 * result['seconds']:.1f}"]
    cells += [f"{1000 * result['least']:.1f} - {1000 * result['most']:.1f}", f"{result['sequences_per_second']:.1f}"]
    cells += [f"{result['tokens_per_second']:.0f}", f"{result['mfu']:.0%} of {result['rate'] / 1e12:.3f}"]
    cells += [f"{result['memory'] / 2**30:.2f}", f"{result['ratio']:.2f}"]
    cells += [f"{result['gain']:.2f}" if "gain" in result else ""]
    return table_row(cells)


COLUMNS = "step|by|type|ms, median|least - most|sequences/s|real tokens/s|MFU, of TFLOP/s|peak GiB".split("|")
COLUMNS += ["time / ours", "float32 / this"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of a round; at least two steps")
    parser.add_argument("--real", type=float, default=0.8, help="share of tokens that are not padding; at least .5")
    parser.add_argument("--compile", default="auto", choices=("auto", "yes", "no"), help="torch.compile; auto: on GPU")
    parser.add_argument("--types", default="", help="float32, bfloat16 or both; empty: see Hardware")
    parser.add_argument("--only", default="", help="time this side only: bertjax or transformers")
    parser.add_argument("--config", action="append", default=[], help="FIELD=VALUE of the config, such as remat=full")
    parser.add_argument("--output", type=pathlib.Path, help="file to append JSON lines to")
    options = parser.parse_args()

    from bertjax.distributed.topology import cpu_dtype, has_accelerator

    names = {"bertjax": Ours}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers") and options.only != "bertjax":
        names["transformers"] = Theirs
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # both sides share a GPU
    if options.types:
        dtypes = options.types.split(",")
    elif has_accelerator():
        dtypes = ["bfloat16"]
    else:
        dtypes = sorted({"float32", cpu_dtype()}, reverse=True)
    packages = [name for name in ("jax", "jaxlib", "flax", "torch", "transformers") if importlib.util.find_spec(name)]
    about = dict(versions={name: importlib.metadata.version(name) for name in packages}, cores=os.cpu_count())
    about |= dict(machine=platform.processor() or platform.machine(), date=time.strftime("%Y-%m-%d"))
    print(table_header(COLUMNS), flush=True)
    for name in options.cases.split(","):
        kind, model, shape = name.split(":")
        case = Case(kind, model, *map(int, shape.split("x")), options.real)
        for result in measure(case, options, names, dtypes):
            print(row(result), flush=True)
            if options.output:
                with options.output.open("a") as file:
                    file.write(json.dumps({**result, "config": options.config, **about}) + "\n")


if __name__ == "__main__":
    main()

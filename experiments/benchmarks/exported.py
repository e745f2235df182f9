"""Speed of exported programs and of the library, and the scores with 8 bits.

Command:  python -m experiments.benchmarks.exported --classifier=RUN --sst2=dev.tsv --vectors=FOLDER --stsb=dev.tsv
          RUN: a run fine-tuned on SST-2; FOLDER: a model of embeddings; dev.tsv: files of GLUE
Measures: texts/s in batches of 32 rows of 16 and of 128 tokens, by `Model.apply`, the programs of StableHLO, ONNX
          Runtime in float32 and with 8 bits; sizes; accuracy on SST-2 and Spearman's correlation on STS-B of each
Needs:    pip install 'bertjax[onnx]'
Results:  RESULTS.md
"""

import argparse
import csv
import functools
import importlib.util
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import jax
import numpy as np
import onnxruntime
import scipy.stats

import bertjax
from bertjax.export import onnx, stablehlo
from experiments.benchmarks.timing import in_turns, seconds_of, spread, table_row

BATCH, ROUNDS = 32, 5
Way = Callable[[np.ndarray], np.ndarray]  # ids [rows, length] -> outputs


def rows_of(path: str) -> list[dict]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def ways(model, folder: pathlib.Path) -> dict[str, Way]:
    stablehlo.write(folder / "stablehlo", model.source)
    print(onnx.write(folder / "onnx", model.source, has_int8=True))
    spec = importlib.util.spec_from_file_location("load", folder / "stablehlo/load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    apply = jax.jit(model.apply)
    found = {"library": lambda ids: np.asarray(apply(model.params, ids)), "StableHLO": module.load()}
    for name, file in {"ONNX": onnx.PROGRAM, "ONNX, 8 bits": onnx.INT8}.items():
        found[name] = in_runtime(folder / "onnx" / onnx.FOLDER / file, model.tokenizer.pad_id)
    return found


def in_runtime(path: pathlib.Path, pad_id: int) -> Way:
    session = onnxruntime.InferenceSession(path)
    names = {each.name for each in session.get_inputs()}

    def run(ids: np.ndarray) -> np.ndarray:
        given = {"input_ids": ids, "attention_mask": ids != pad_id, "token_type_ids": 0 * ids}
        return session.run(None, {name: given[name].astype(np.int64) for name in names})[0]

    return run


def batches(model, texts: list[str]) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yields (indices, ids) of texts of similar lengths; ids are padded to a multiple of 16."""
    ids = [model.tokenizer.framed(each[:126]) for each in model.tokenizer.encode_ids(texts)]
    order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        length = -(-len(ids[places[-1]]) // 16) * 16
        yield places, np.array([ids[p] + [model.tokenizer.pad_id] * (length - len(ids[p])) for p in places], np.int32)


def outputs(model, run: Way, texts: list[str]) -> np.ndarray:
    found = {}
    for places, ids in batches(model, texts):
        found.update(zip(places, run(ids)))
    return np.array([found[place] for place in range(len(texts))])


def time_all(name: str, model, sides: dict[str, Way]) -> None:
    for length in (16, 128):
        ids = np.random.default_rng(0).integers(5, model.config.vocab_size, (BATCH, length)).astype(np.int32)
        for run in sides.values():
            run(ids)  # compiles

        def texts_per_second(run: Way, ids: np.ndarray = ids) -> float:
            return 4 * BATCH / seconds_of(lambda: [run(ids) for _ in range(4)])

        rates = in_turns({side: functools.partial(texts_per_second, run) for side, run in sides.items()}, ROUNDS)
        print(table_row([f"{name}, {length} tokens", *map(spread, rates.values())]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("classifier", "sst2", "vectors", "stsb"):
        parser.add_argument(f"--{flag}", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = bertjax.load(options.classifier, dtype="float32")
        sides, rows = ways(model, pathlib.Path(folder, "classifier")), rows_of(options.sst2)
        time_all("classifier", model, sides)
        labels = [model.source.labels.index(row["label"]) for row in rows]
        for side, run in sides.items():
            right = outputs(model, run, [row["sentence"] for row in rows]).argmax(-1) == labels
            print(f"SST-2, {side}: accuracy {right.mean():.2%}", flush=True)
        model = bertjax.load(options.vectors, dtype="float32")
        sides, rows = ways(model, pathlib.Path(folder, "vectors")), rows_of(options.stsb)
        time_all("vectors", model, sides)
        for side, run in sides.items():
            pair = (outputs(model, run, [row[name] for row in rows]) for name in ("sentence1", "sentence2"))
            left, right = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in pair)
            score = scipy.stats.spearmanr((left * right).sum(-1), [float(row["score"]) for row in rows]).statistic
            print(f"STS-B, {side}: Spearman {100 * score:.2f}", flush=True)


if __name__ == "__main__":
    main()

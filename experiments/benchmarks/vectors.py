"""Embeddings trained in bertjax and with sentence-transformers' trainer: the same weights, examples and settings.

Rows: as_is, the weights without training; stsb, pairs with scores; squad, questions and their paragraphs; squad_mined,
with a hard negative per question, mined with the weights; squad_widths, with Matryoshka dimensions 256, 128, ... With
--bert=WORKDIR, a BERT trained by bertjax: bert_as_is; bert_stsb; bert_simcse, sentences of Wikipedia, each encoded
twice with dropout. All rows are scored on STS-B's dev set (GLUE's test set has no scores). Rows with questions are also
scored on all paragraphs of SQuAD's dev set. Each library draws its batches and dropout. All numbers are float32.

Command:  python -m experiments.benchmarks.vectors --weights=DIR --data=DATA --output=results.jsonl
          DIR: a BERT of sentence-transformers, such as all-MiniLM-L6-v2, with mean pooling. DATA: the folder with
          glue/STS-B, squad/ and corpora/wikipedia-000.txt.xz. The same command resumes, and prints the tables of all
          results so far. --rows, --seeds, --sides, --questions and --sentences select; --examples=64 is a quick test
Needs:    pip install torch sentence-transformers datasets
Hardware: 2 CPU cores, an hour and a half
Score:    see RESULTS.md
"""

import dataclasses
import itertools
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import numpy as np

from bertjax.launch.validate import validate
from experiments import embed
from experiments.benchmarks.beside_transformers import keep, parse, train_ours
from experiments.benchmarks.timing import mean_and_deviation, table_header, table_row

SIDES = ("sentence-transformers", "bertjax")
WIDTHS = (384, 256, 128, 64, 32, 16)
SCORED = {"data.form": "scored", "data.texts": "sentence1,sentence2", "data.label": "score", "batch_size": 32}
SCORED |= {"epochs": 2.0, "optimizer.learning_rate": 5e-5}
ASKED = {"data.form": "pairs", "batch_size": 64, "optimizer.learning_rate": 5e-5, "max_seq_length": 256}
# The data of each row, and the fields of its config.
ROWS = {
    "as_is": ("", ASKED),
    "stsb": ("stsb", SCORED),
    "squad": ("squad", ASKED),
    "squad_mined": ("squad_mined", ASKED | {"data.texts": "anchor,positive,negative_1"}),
    "squad_widths": ("squad", ASKED | {"loss.widths": ",".join(map(str, WIDTHS))}),
    "bert_as_is": ("", ASKED),
    "bert_stsb": ("stsb", SCORED),
    "bert_simcse": ("sentences", {"data.form": "sentences", "data.texts": "text", "optimizer.learning_rate": 3e-5}),
}
SIZES = {"questions": 8000, "sentences": 50_000, "examples": 0}


def write_data(data: pathlib.Path, folder: pathlib.Path, sizes: dict[str, int], rows: list[str]) -> None:
    """Writes the data of the rows: NAME.jsonl for training, and the dev sets for the evaluation."""
    most = sizes["examples"] or None
    for part in ("train", "dev"):
        lines = (data / "glue/STS-B" / f"{part}.tsv").read_text().splitlines()
        names = lines[0].split("\t")
        found = [dict(zip(names, line.split("\t"))) for line in lines[1:]]
        pairs = [{name: row[name] for name in ("sentence1", "sentence2", "score")} for row in found]
        write(folder / ("stsb.jsonl" if part == "train" else "stsb-dev.jsonl"), pairs[:most])
    asked = _questions(data / "squad/train-v1.1.json")
    random.Random(0).shuffle(asked)
    write(folder / "squad.jsonl", asked[: min(sizes["questions"], most or len(asked))])
    write(folder / "squad-dev.jsonl", _questions(data / "squad/dev-v1.1.json")[:most])
    if "bert_simcse" in rows:
        texts = _sentences(str(data / "corpora/wikipedia-000.txt.xz"))
        kept = itertools.islice(texts, min(sizes["sentences"], most or sizes["sentences"]))
        write(folder / "sentences.jsonl", [{"text": text} for text in kept])


def write(path: pathlib.Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def _questions(path: pathlib.Path) -> list[dict]:
    paragraphs = (each for article in json.loads(path.read_text())["data"] for each in article["paragraphs"])
    return [
        {"anchor": asked["question"].strip(), "positive": paragraph["context"].strip()}
        for paragraph in paragraphs
        for asked in paragraph["qas"]
    ]


def _sentences(path: str):
    """Yields each sentence of 6 to 64 words once."""
    from bertjax.data.corpus import corpus, sentences

    seen = set()
    for document in corpus.read_documents([path]):
        for text in sentences.split(document):
            if text not in seen and 6 <= len(text.split()) <= 64:
                seen.add(text)
                yield text


def mine(weights: str, folder: pathlib.Path) -> None:
    """Writes squad_mined.jsonl: each pair with the paragraph that is the nearest below the positive paragraph."""
    command = [sys.executable, "-m", "bertjax.mine", f"--checkpoint={weights}", f"--data={folder / 'squad.jsonl'}"]
    command += ["--negatives=1", "--margin=5%", f"--output={folder / 'squad_mined.jsonl'}"]
    subprocess.run(command, check=True)


def make_config(row: str, start: str, folder: pathlib.Path, seed: int):
    config, (name, changes) = embed.get_config(), ROWS[row]
    config.init_checkpoint, config.data.path = start, str(folder / f"{name}.jsonl")
    config.update(dict(log_every_steps=10, max_seq_length=64, seed=seed, dtype="float32"))
    config.update_from_flattened_dict(changes)
    with config.unlocked():
        config.data.dev.update(path=str(folder / "stsb-dev.jsonl"), form="scored", texts="sentence1,sentence2")
        config.data.dev.label = "score"
    if name:
        validate(config)
    return config


def scores_of(vectors_of, row: str, folder: pathlib.Path) -> dict[str, float]:
    """Returns the scores of a function from texts to embeddings `[texts, width]`."""
    from bertjax.finetuning.metrics import l2_normalize, spearman

    pairs = read(folder / "stsb-dev.jsonl")
    first, second = (l2_normalize(vectors_of([pair[name] for pair in pairs])) for name in ("sentence1", "sentence2"))
    scores = {"spearman": spearman([float(pair["score"]) for pair in pairs], (first * second).sum(1))}
    if row == "as_is" or row.startswith("squad"):
        asked = read(folder / "squad-dev.jsonl")
        paragraphs = list(dict.fromkeys(each["positive"] for each in asked))
        numbers = {text: number for number, text in enumerate(paragraphs)}
        own = np.array([numbers[each["positive"]] for each in asked])
        queries, documents = vectors_of([each["anchor"] for each in asked]), vectors_of(paragraphs)
        for width in (None, *(width for width in WIDTHS if width < queries.shape[1])):
            cosines = l2_normalize(queries[:, :width]) @ l2_normalize(documents[:, :width]).T
            ranks = 1 + (cosines > cosines[np.arange(len(own)), own, None]).sum(1)
            named = f"_{width}" if width else ""
            scores[f"ndcg@10{named}"] = float(np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0).mean())
            scores[f"recall@1{named}"] = float((ranks == 1).mean())
    return scores


def score_ours(path: str, row: str, folder: pathlib.Path) -> dict[str, float]:
    from bertjax.interop import pretrained

    source = pretrained.read_with_tokenizer(path, "float32")
    if source.settings.get("task") == "pretraining":  # a pre-trained model has no embeddings yet
        source = dataclasses.replace(source, settings={**source.settings, "head": embed.get_config().head.to_dict()})

    def vectors_of(texts: list[str]) -> np.ndarray:
        return np.array([each["vector"] for each in embed_task().predict(source, [(text,) for text in texts])])

    return scores_of(vectors_of, row, folder)


def embed_task():
    from bertjax.inference import tasks

    return tasks.get("embed")


def make_theirs(config):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    transformer = Transformer(config.init_checkpoint, max_seq_length=config.max_seq_length)
    pooling = Pooling(transformer.get_word_embedding_dimension(), pooling_mode="mean")
    return SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")


def loss_of(model, config):
    """Returns the loss of sentence-transformers for the config."""
    from sentence_transformers import losses

    scale = 1 / config.loss.temperature
    if config.data.form == "scored":
        loss = losses.CoSENTLoss(model, scale=scale)
    else:
        loss = losses.MultipleNegativesRankingLoss(model, scale=scale)
    if config.loss.widths:
        loss = losses.MatryoshkaLoss(model, loss, list(map(int, config.loss.widths.split(","))))
    return loss


def examples_of(config) -> list[dict]:
    """Returns the training examples in the format of sentence-transformers' trainer."""
    rows = read(pathlib.Path(config.data.path))
    if config.data.form == "sentences":
        return [{"anchor": row["text"], "positive": row["text"]} for row in rows]
    named = [{name: row[name] for name in config.data.texts.split(",")} for row in rows]
    if config.data.form == "scored":
        return [each | {"score": float(row["score"]) / 5} for each, row in zip(named, rows)]
    return named


def train_theirs(config, folder: pathlib.Path, batch_sampler=None):
    """Returns the model, and the seconds of each step. The first step is left out unless it is the only step.

    The loss of sentence-transformers treats a repeated text of a batch as a negative of itself. By default, batches of
    pairs therefore contain no text twice, as the documentation of sentence-transformers recommends.
    """
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from transformers import TrainerCallback, set_seed

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **more):
            ends.append(time.monotonic())

        on_train_begin = on_step_end

    ends, optimizer = [], config.optimizer
    batch_sampler = batch_sampler or ("no_duplicates" if config.data.form == "pairs" else "batch_sampler")
    set_seed(config.seed)
    model = make_theirs(config)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "theirs"), num_train_epochs=config.epochs, seed=config.seed, use_cpu=True,
        per_device_train_batch_size=config.batch_size, learning_rate=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_proportion, max_grad_norm=optimizer.max_grad_norm,
        weight_decay=optimizer.weight_decay, adam_epsilon=optimizer.epsilon, batch_sampler=batch_sampler,
        save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = datasets.Dataset.from_list(examples_of(config))
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=data, loss=loss_of(model, config), callbacks=[Clock()]
    )
    trainer.train()
    steps = np.diff(ends)
    return model, steps[1:] if len(steps) > 1 else steps


def score_theirs(model, row: str, folder: pathlib.Path) -> dict[str, float]:
    def vectors_of(texts: list[str]) -> np.ndarray:
        return model.encode(texts, batch_size=32, show_progress_bar=False)

    return scores_of(vectors_of, row, folder)


def _summary(results: list[dict], metric: str) -> str:
    return mean_and_deviation([100 * each["scores"][metric] for each in results if metric in each["scores"]])


def tables(results: list[dict]) -> str:
    """Formats scores in hundredths (mean ± standard deviation over the seeds), seconds per step, and nDCG by width."""
    lines = [table_header(["row", "score", *SIDES, *(f"seconds a step, {by}" for by in SIDES)])]
    found = {
        (row, by): [each for each in results if (each["row"], each["by"]) == (row, by)] for row in ROWS for by in SIDES
    }
    for row, metric in itertools.product(ROWS, ("spearman", "ndcg@10", "recall@1")):
        cells = [_summary(found[row, by], metric) for by in SIDES]
        if any(cells):
            times = [[each["seconds"] for each in found[row, by] if each["seconds"]] for by in SIDES]
            cells += [f"{np.median(each):.3f}" if each else "" for each in times]
            lines.append(table_row([row, metric, *cells]))
    curves = [each for each in found if any("ndcg@10_64" in result["scores"] for result in found[each])]
    if curves:
        lines += ["", table_header(["nDCG@10 by dimensions", *(f"{row}, {by}" for row, by in curves)])]
        for suffix in ("", *(f"_{width}" for width in WIDTHS)):
            cells = [_summary(found[each], f"ndcg@10{suffix}") for each in curves]
            if any(cells):
                lines.append(table_row([suffix[1:] or "all", *cells]))
    return "\n".join(lines)


def main() -> None:
    options = {name: dict(type=int, default=size) for name, size in SIZES.items()}
    arguments, results = parse(__doc__, "rows", ROWS, SIDES, options | {"bert": dict(default="")})
    done = {(result["row"], result["seed"], result["by"]) for result in results}

    from bertjax.distributed.mesh import use_cpu_cores
    from bertjax.finetuning import run as finetuning_run
    from bertjax.interop import conversion

    rows = [row for row in arguments.rows.split(",") if arguments.bert or not row.startswith("bert_")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        write_data(arguments.data.resolve(), folder, {name: getattr(arguments, name) for name in SIZES}, rows)
        programs = {}
        seeds = list(map(int, arguments.seeds.split(",")))
        for row, seed, by in itertools.product(rows, seeds, arguments.sides.split(",")):
            name, is_theirs = ROWS[row][0], by == "sentence-transformers"
            if (row, seed, by) in done or (not name and seed != seeds[0]):
                continue
            start = arguments.bert if row.startswith("bert_") else arguments.weights
            if is_theirs and row.startswith("bert_"):
                start = str(folder / "bert")
                if not (folder / "bert").exists():
                    conversion.convert(arguments.bert, start, "huggingface")
            if name == "squad_mined" and not (folder / "squad_mined.jsonl").exists():
                mine(arguments.weights, folder)
            config, seconds = make_config(row, start, folder, seed), None
            use_cpu_cores(config)
            if is_theirs:
                model, steps = train_theirs(config, folder) if name else (make_theirs(config), None)
                seconds = float(np.median(steps)) if name else None
                scores = score_theirs(model, row, folder)
            elif name:
                config, _ = finetuning_run.resolve(config, None)
                own = folder / f"{row}-{seed}"
                own.mkdir()
                opened = finetuning_run.KIND.open(config, own, None)
                _, seconds, programs[row] = train_ours(opened, own, programs.get(row))
                scores = score_ours(str(own), row, folder)
            else:
                scores = score_ours(start, row, folder)
            keep(dict(row=row, seed=seed, by=by, scores=scores, seconds=seconds), results, arguments.output)
    print(tables(results))


if __name__ == "__main__":
    main()

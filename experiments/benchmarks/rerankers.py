"""Rerankers trained in bertjax and with sentence-transformers' trainer, and embeddings distilled from the reranker.

Data: questions and paragraphs of SQuAD. The training questions come from ARTICLES articles of the training set; `mine`
adds four negatives to each question, with a model of embeddings. The test questions come from the dev set; their
candidates are the 100 nearest of the 2,067 paragraphs of the dev set, with the same embeddings.

Rows of the results:
  steps      an epoch of the same pairs on each side, alternating: sentence-transformers, and bertjax with padding, with
             packing, and with packing and bfloat16 products. The times include the making of batches, and in
             sentence-transformers tokenization, which its trainer does in each step.
  reranker   each library trains a reranker from the same weights, pairs and settings, in float32, for each seed.
             `bertjax evaluate` evaluates both on the same candidates. Each library draws its batches and dropout.
  embeddings the embeddings after training on the same questions and negatives, for each seed: with the scores of the
             first reranker (KL divergence, with and without InfoNCE), and without a teacher (InfoNCE); retrieval among
             all paragraphs.

Command:  python -m experiments.benchmarks.rerankers --weights=DIR --data=DATA --output=FOLDER
          DIR: a BERT of sentence-transformers, such as all-MiniLM-L6-v2. DATA: the folder with squad/. The same
          command resumes, and prints the tables of all results so far. --rows, --seeds and --loss select
Needs:    pip install torch sentence-transformers datasets
Hardware: 2 CPU cores, about an hour
Results:  RESULTS.md
"""

import argparse
import itertools
import json
import pathlib
import random
import subprocess
import sys
import time

from experiments.benchmarks.timing import epoch_timer, in_turns, mean_and_deviation, spread, table_header, table_row

ROWS = ("steps", "reranker", "embeddings")
THEIRS = "sentence-transformers"
SIDES = {
    "bertjax": ["--config.dtype=float32", "--config.packing=False"],
    "bertjax packed": ["--config.dtype=float32"],
    "bertjax packed, dtype=auto": [],
}
ARTICLES, NEGATIVES, SEQUENCE = 100, 4, 256
RETRIEVED = 2000  # test questions for the embeddings; the first questions of these are for the rerankers
COLUMNS = ["anchor", "positive", *(f"negative_{number + 1}" for number in range(NEGATIVES))]
BATCH = {"binary_cross_entropy": 32, "list_net": 8}  # pairs or lists
# The weight of the teacher in the loss, and the temperature of its scores. A reranker that was trained with ListNet
# gives a relevant document a score about 1 higher than other documents: with the temperature 1, its distribution is
# flat.
DISTILLED = {"distilled": (0.5, 0.1), "distilled-only": (1.0, 0.1), "distilled-flat": (1.0, 1.0)}
METRICS = ("ndcg@10", "base_ndcg@10", "mrr@10", "map", "recall@1")


def bertjax(*arguments: object, output: pathlib.Path | None = None) -> str:
    """Runs a command, and returns its standard output. With `output`, skips the command if the path exists."""
    if output is not None and output.exists():
        return ""
    command = [sys.executable, "-m", "bertjax", *map(str, arguments)]
    print("+", *command[3:], flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def write(path: pathlib.Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def write_data(squad: pathlib.Path, folder: pathlib.Path, questions: int, queries: int) -> None:
    """Writes pairs and documents for mining, and the collection with the test questions."""
    draw = random.Random(0)
    articles = json.loads((squad / "train-v1.1.json").read_text())["data"]
    paragraphs = [paragraph for article in draw.sample(articles, ARTICLES) for paragraph in article["paragraphs"]]
    pairs = [
        {"anchor": asked["question"].strip(), "positive": paragraph["context"].strip()}
        for paragraph in paragraphs
        for asked in paragraph["qas"]
    ]
    write(folder / "pairs.jsonl", draw.sample(pairs, min(questions, len(pairs))))
    texts = dict.fromkeys(paragraph["context"].strip() for paragraph in paragraphs)
    write(folder / "documents.jsonl", [{"text": text} for text in texts])

    articles = json.loads((squad / "dev-v1.1.json").read_text())["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    documents = {
        text: f"d{number}" for number, text in enumerate(dict.fromkeys(p["context"].strip() for p in paragraphs))
    }
    asked = [(each["question"].strip(), documents[p["context"].strip()]) for p in paragraphs for each in p["qas"]]
    asked = [(f"q{number}", *each) for number, each in enumerate(draw.sample(asked, RETRIEVED))]
    collection = folder / "collection"
    write(collection / "corpus.jsonl", [{"_id": name, "title": "", "text": text} for text, name in documents.items()])
    write(collection / "queries.jsonl", [{"_id": query, "text": text} for query, text, _ in asked])
    (collection / "qrels").mkdir(exist_ok=True)
    for name, judged in (("retrieved", asked), ("reranked", asked[:queries])):
        lines = "".join(f"{query}\t{document}\t1\n" for query, _, document in judged)
        (collection / f"qrels/{name}.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)


def prepare(arguments: argparse.Namespace) -> None:
    """Writes the data, the candidates of the test questions, and the mined negatives."""
    folder, weights = arguments.output, arguments.weights
    if not (folder / "collection/qrels/reranked.tsv").exists():
        write_data(arguments.data.resolve() / "squad", folder, arguments.questions, arguments.queries)
    candidates, mined = folder / "candidates.trec", folder / "mined.jsonl"
    collection = folder / "collection"
    searched = [f"--corpus={collection / 'corpus.jsonl'}", f"--queries={collection / 'queries.jsonl'}", "--top_k=100"]
    bertjax("search", weights, *searched, f"--run={candidates}", output=candidates)
    bertjax("mine", weights, *mining(folder), f"--output={mined}", output=mined)
    if not (folder / "dev.jsonl").exists():
        write(folder / "dev.jsonl", read(mined)[:20])  # training needs a dev set; nothing depends on its scores
    write(folder / "timed.jsonl", read(mined)[: arguments.timed_questions])


def mining(folder: pathlib.Path) -> list[str]:
    data = [f"--data={folder / 'pairs.jsonl'}", f"--corpus={folder / 'documents.jsonl'}"]
    return [*data, f"--negatives={NEGATIVES}", "--first=2", "--last=50"]


def flags_of(arguments: argparse.Namespace, data: str, seed: int) -> list[str]:
    """Returns the flags of a training of the reranker on a file of the output folder."""
    fields = {
        "init_checkpoint": arguments.weights,
        "data.path": arguments.output / data,
        "data.texts": ",".join(COLUMNS),
        "data.dev.path": arguments.output / "dev.jsonl",
        "loss.name": arguments.loss,
        "batch_size": BATCH[arguments.loss],
        "optimizer.learning_rate": arguments.learning_rate,
        "max_seq_length": SEQUENCE,
        "seed": seed,
    }
    if arguments.loss == "binary_cross_entropy":
        fields["loss.positive_weight"] = float(NEGATIVES)
    return [f"--config.{name}={value}" for name, value in fields.items()]


def config_of(arguments: argparse.Namespace, data: str, seed: int, changes: list[str]):
    """Returns the resolved config of a training of the reranker."""
    from bertjax.cli.overrides import from_arguments
    from bertjax.finetuning import run
    from bertjax.launch.validate import validate

    config, _ = from_arguments(["rerankers", "--config=rerank", *flags_of(arguments, data, seed), *changes])
    validate(config)
    return run.resolve(config, None)[0]


def train_theirs(arguments: argparse.Namespace, data: str, seed: int, folder: pathlib.Path | None):
    """Trains a CrossEncoder, saves it in the folder, and returns the seconds of each step except the first step."""
    import datasets
    import numpy as np
    import torch
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        losses,
    )
    from transformers import TrainerCallback, set_seed

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **more):
            ends.append(time.monotonic())

        on_train_begin = on_step_end

    set_seed(seed)
    ends: list[float] = []
    config = config_of(arguments, data, seed, [])
    model = CrossEncoder(arguments.weights, num_labels=1, max_length=SEQUENCE, device="cpu")
    mined, optimizer = read(arguments.output / data), config.optimizer
    if arguments.loss == "binary_cross_entropy":
        rows = [
            {"query": row["anchor"], "document": row[column], "label": float(column == "positive")}
            for row in mined
            for column in COLUMNS[1:]
            if row[column]
        ]
        loss = losses.BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(float(NEGATIVES)))
    else:
        lists = [(row["anchor"], [row[column] for column in COLUMNS[1:] if row[column]]) for row in mined]
        rows = [{"query": q, "docs": docs, "labels": [1.0] + [0.0] * (len(docs) - 1)} for q, docs in lists]
        loss = losses.ListNetLoss(model)
    settings = CrossEncoderTrainingArguments(
        output_dir=str(arguments.output / "theirs"), num_train_epochs=config.epochs, seed=seed, use_cpu=True,
        per_device_train_batch_size=config.batch_size, learning_rate=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_proportion, max_grad_norm=optimizer.max_grad_norm,
        weight_decay=optimizer.weight_decay, adam_epsilon=optimizer.epsilon,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    examples = datasets.Dataset.from_list(rows)
    CrossEncoderTrainer(model, settings, train_dataset=examples, loss=loss, callbacks=[Clock()]).train()
    if folder is not None:
        model.save_pretrained(str(folder))
    return np.diff(ends)[1:]


def epoch_of_ours(arguments: argparse.Namespace, changes: list[str]):
    """Returns a function that trains an epoch from the initial params, and returns the seconds per step."""
    from bertjax.distributed.mesh import use_cpu_cores
    from bertjax.finetuning import run as finetuning_run

    config = config_of(arguments, "timed.jsonl", 0, changes)
    use_cpu_cores(config)
    return epoch_timer(finetuning_run.KIND.open(config, arguments.output, None))


def train_ours(arguments: argparse.Namespace, seed: int, folder: pathlib.Path) -> None:
    bertjax(
        "train",
        "--config=rerank",
        *flags_of(arguments, "mined.jsonl", seed),
        "--config.dtype=float32",
        f"--workdir={folder}",
    )


def embeddings(arguments: argparse.Namespace, row: str, seed: int) -> pathlib.Path:
    """Trains embeddings with the scores of the first reranker or without a teacher, and returns the run."""
    folder = arguments.output
    scored, run = folder / "scored.jsonl", folder / f"{row}-{seed}"
    reranker = f"--reranker={folder / f'bertjax-{arguments.loss}-0'}"
    bertjax("mine", arguments.weights, *mining(folder), reranker, "--scores", f"--output={scored}", output=scored)
    fields = {
        "init_checkpoint": arguments.weights,
        "data.path": scored,
        "data.texts": ",".join(COLUMNS),
        "data.dev.path": folder / "pairs.jsonl",
        "data.dev.texts": "anchor,positive",
        "batch_size": 32,
        "optimizer.learning_rate": arguments.embedding_rate,
        "max_seq_length": SEQUENCE,
        "seed": seed,
    }
    if row in DISTILLED:
        fields |= {"data.label": ",".join(f"score_{column}" for column in COLUMNS[1:])}
        fields |= {"distill.what": "kl", "distill.student_temperature": 0.05}
        fields["distill.weight"], fields["distill.teacher_temperature"] = DISTILLED[row]
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    bertjax("train", "--config=embed", *flags, f"--workdir={run}", output=run)
    return run


def evaluate(checkpoint: object, judged: pathlib.Path, *candidates: str) -> dict[str, float]:
    """Returns the scores of `bertjax evaluate` on the questions of a file of relevance judgements."""
    printed = bertjax("evaluate", checkpoint, f"--data={judged}", "--form=search", "--json", *candidates)
    return json.loads(printed)["scores"]


def tables(results: list[dict]) -> str:
    """Formats the results: times in ms, and scores in hundredths (mean ± standard deviation over the seeds)."""
    lines = [table_header(["a step", "ms", "sentence-transformers / bertjax"])]
    steps = {each["by"]: each["seconds"] for each in results if each["row"] == "steps"}
    for by, seconds in steps.items():
        ratios = [theirs / ours for theirs, ours in zip(steps[THEIRS], seconds)]
        lines.append(table_row([by, spread([1000 * each for each in seconds]), spread(ratios, 2)]))
    lines += ["", table_header(["row", "by", *METRICS])]
    for row, by in dict.fromkeys((each["row"], each["by"]) for each in results if "scores" in each):
        scores = [each["scores"] for each in results if (each["row"], each["by"]) == (row, by)]
        cells = (mean_and_deviation([100 * each[name] for each in scores if name in each]) for name in METRICS)
        lines.append(table_row([row, by, *cells]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--loss", default="list_net", choices=BATCH)
    parser.add_argument("--learning_rate", default=2e-4, type=float)
    parser.add_argument("--embedding_rate", default=5e-5, type=float)
    parser.add_argument("--questions", default=1000, type=int)
    parser.add_argument("--queries", default=120, type=int)
    parser.add_argument("--timed_questions", default=160, type=int)
    parser.add_argument("--rounds", default=3, type=int)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "results.jsonl"
    results = read(file) if file.exists() else []
    done = {(each["row"], each["by"], each.get("seed")) for each in results}

    def keep(**result) -> None:
        results.append(result)
        with file.open("a") as appended:
            appended.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)

    prepare(arguments)
    judged, rows = arguments.output / "collection/qrels", arguments.rows.split(",")
    candidates = f"--candidates={arguments.output / 'candidates.trec'}"
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if "steps" in rows and ("steps", THEIRS, None) not in done:
        sides = {THEIRS: lambda: float(train_theirs(arguments, "timed.jsonl", 0, None).mean())}
        sides |= {by: epoch_of_ours(arguments, changes) for by, changes in SIDES.items()}
        for by in SIDES:
            sides[by]()  # compiles
        for by, seconds in in_turns(sides, arguments.rounds).items():
            keep(row="steps", by=by, seconds=seconds)
    for seed, by in itertools.product(seeds if "reranker" in rows else (), (THEIRS, "bertjax")):
        if ("reranker", by, seed) in done:
            continue
        folder = arguments.output / f"{by}-{arguments.loss}-{seed}"
        if not folder.exists():
            train_theirs(arguments, "mined.jsonl", seed, folder) if by == THEIRS else train_ours(
                arguments, seed, folder
            )
        keep(row="reranker", by=by, seed=seed, scores=evaluate(folder, judged / "reranked.tsv", candidates))
    if "embeddings" in rows and ("embeddings", "as_is", None) not in done:
        keep(row="embeddings", by="as_is", seed=None, scores=evaluate(arguments.weights, judged / "retrieved.tsv"))
    for seed, by in itertools.product(seeds if "embeddings" in rows else (), ("infonce", *DISTILLED)):
        if ("embeddings", by, seed) not in done:
            run = embeddings(arguments, by, seed)
            keep(row="embeddings", by=by, seed=seed, scores=evaluate(run, judged / "retrieved.tsv"))
    print(tables(results))


if __name__ == "__main__":
    main()

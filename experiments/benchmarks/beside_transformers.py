"""Fine-tuning in bertjax and in transformers (PyTorch): the same weights, examples and hyperparameters, several seeds.

For each seed, both libraries start from the same output layer. Padded batches are the same in both libraries, except
for the dropout masks. Packed batches differ. All numbers are float32, except the factors of products of
`bertjax bfloat16`.

Command:  python -m experiments.benchmarks.beside_transformers --weights=DIR --data=DATA --output=results.jsonl
          DIR: a BERT in Hugging Face's format. DATA: the folder with glue/, conll2003/ and squad/.
          The same command resumes, and prints the table of all results so far.
Needs:    pip install torch transformers
Hardware: 2 CPU cores, some hours
Score:    see RESULTS.md
"""

import argparse
import collections
import itertools
import json
import pathlib
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bertjax.inference import predictor
from bertjax.launch.validate import validate
from experiments import glue, ner, squad
from experiments.benchmarks.timing import mean_and_deviation, table_header, table_row

SST2_ROWS, CONLL_SENTENCES, SQUAD_QUESTIONS, SQUAD_DEV_QUESTIONS = 5000, 3000, 3000, 1000
EPOCHS = {"sst2": 1, "stsb": 1, "conll": 3, "mrpc": 2, "rte": 1, "cola": 1, "squad": 1}
SIDES = ("transformers", "bertjax", "bertjax packed", "bertjax bfloat16")
METRICS = {
    "mrpc": ("f1", "accuracy"),
    "rte": ("accuracy",),
    "stsb": ("spearman", "pearson"),
    "cola": ("matthews", "accuracy"),
    "sst2": ("accuracy",),
    "conll": ("f1",),
    "squad": ("f1", "exact_match"),
}


def make_config(name: str, weights: str, data: pathlib.Path, packing: bool = False):
    if name == "conll":
        config, path = ner.get_config(), data / "conll2003"
        config.max_seq_length = 64  # sentences of a document together, in twice the number of steps
    elif name == "squad":
        config, path = squad.get_config("v1.1"), data / "squad"
    else:
        config, path = glue.get_config(name), data / "glue"
    config.update(dict(init_checkpoint=weights, epochs=float(EPOCHS[name]), log_every_steps=10))
    config.batch_size = 16 if name == "conll" else 32
    config.data.path, config.optimizer.learning_rate, config.packing = str(path), 1e-4, packing
    validate(config)
    return config


def shorten(data: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the data with fewer training rows of the large sets, and fewer dev questions of SQuAD."""
    (folder / "glue").mkdir()
    for source in (data / "glue").iterdir():
        target = folder / "glue" / source.name
        if source.name == "SST-2":
            target.mkdir()
            lines = (source / "train.tsv").read_text().splitlines(keepends=True)
            (target / "train.tsv").write_text("".join(lines[: SST2_ROWS + 1]))
            (target / "dev.tsv").symlink_to(source / "dev.tsv")
        else:
            target.symlink_to(source)
    (folder / "conll2003").mkdir()
    (folder / "conll2003" / "eng.testa").symlink_to(data / "conll2003" / "eng.testa")
    kept, sentences, words = [], 0, 0
    for line in (data / "conll2003" / "eng.train").read_text().splitlines(keepends=True):
        is_word = bool(line.strip()) and not line.startswith("-DOCSTART-")
        sentences += words > 0 and not is_word
        words = words + 1 if is_word else 0
        if sentences == CONLL_SENTENCES:
            break
        kept.append(line)
    (folder / "conll2003" / "eng.train").write_text("".join(kept))
    (folder / "squad").mkdir()
    for name, most in (("train-v1.1.json", SQUAD_QUESTIONS), ("dev-v1.1.json", SQUAD_DEV_QUESTIONS)):
        content, left = json.loads((data / "squad" / name).read_text()), most
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                paragraph["qas"] = paragraph["qas"][:left]
                left -= len(paragraph["qas"])
        (folder / "squad" / name).write_text(json.dumps(content))


def check_same_ids(name: str, config, dataset, weights: str) -> None:
    """Checks that transformers' tokenizer makes the same ids of GLUE's texts. Other tasks share bertjax's examples."""
    import transformers

    from bertjax.data.corpus.tables import column, read_table
    from bertjax.finetuning.tasks.glue import DATASETS, find_folder

    if name not in DATASETS:
        return
    task, tokenizer = DATASETS[name], transformers.AutoTokenizer.from_pretrained(weights)
    rows, _ = read_table(find_folder(config.data.path, task.folder) / "train.tsv", task.names, quoting=False)
    texts = [[column(row, task.columns.first) for row in rows]]
    if task.columns.second:
        texts.append([column(row, task.columns.second) for row in rows])
    # longest_first is Google's rule, except for the truncated side of two texts of equal length
    theirs = tokenizer(*texts, truncation="longest_first", max_length=config.max_seq_length)["input_ids"]
    cut = [len(ids) == config.max_seq_length for ids in theirs]
    same = [list(ours) == other for ours, other in zip(dataset.train.input_ids, theirs)]
    assert all(a or b for a, b in zip(same, cut)), f"{name}: {same.index(False)} is tokenized otherwise"


def train_ours(opened, workdir, program):
    """Trains a `FineTuningRun`, and writes its info to the workdir.

    Returns:
      The scores, the seconds per step (the median of ten-step averages), and the program.
    """
    from bertjax.training.checkpoints.workdir import write_info
    from bertjax.training.loop import train_task
    from bertjax.training.step import Program
    from bertjax.training.trackers.jsonl import read_metrics

    task, config, mesh = opened.task, opened.config, opened.mesh
    config.eval.every_steps = task.total_steps
    program = program or Program(task, config, mesh)
    scores = train_task(task, config, workdir, mesh, opened.initial_params, program).scores.scores
    write_info(workdir, opened.info, opened.tokenizer)
    rates = [line["train/sequences_per_second"] for line in read_metrics(workdir) if "train/loss" in line]
    return scores, config.batch_size / float(np.median(rates)), program


def make_theirs(name: str, config, dataset):
    import transformers

    kind = {"conll": "AutoModelForTokenClassification", "squad": "AutoModelForQuestionAnswering"}
    labels = {} if name == "squad" else {"num_labels": max(1, len(dataset.labels))}
    cls = getattr(transformers, kind.get(name, "AutoModelForSequenceClassification"))
    model = cls.from_pretrained(config.init_checkpoint, **labels, dtype="float32")
    for rate in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        assert getattr(model.config, rate) == config.model[rate]
    return model


def draw_output_layer(config, mesh, dataset) -> tuple[np.ndarray, np.ndarray]:
    """Returns the initial output layer of bertjax's run: (kernel `[hidden, outputs]`, bias `[outputs]`)."""
    import flax.linen as nn
    import jax

    from bertjax.finetuning.task import FineTuning

    init_params = FineTuning(config, mesh, dataset).init_params
    params = nn.meta.unbox(jax.jit(init_params)(jax.random.key(config.seed)))
    (head,) = (part for name, part in params.items() if name != "bert")
    return np.asarray(head["dense"]["kernel"]), np.asarray(head["dense"]["bias"])


def predict_theirs(model, examples) -> list[np.ndarray]:
    import torch

    model.eval()
    order, outputs = np.argsort(-examples.lengths), [None] * len(examples)
    with torch.inference_mode():
        for first in range(0, len(order), 32):
            rows = order[first : first + 32]
            batch = examples.batch(rows, int(examples.lengths[rows].max()))
            out = model(**tensors(batch))
            logits = torch.stack([out.start_logits, out.end_logits], -1) if "start_logits" in out else out.logits
            for row, scores in zip(rows, logits.numpy()):
                outputs[row] = scores[: examples.lengths[row]] if scores.ndim == 2 else scores
    return outputs


def tensors(batch: dict) -> dict:
    import torch

    names = {"input_ids": "input_ids", "segments": "attention_mask", "token_types": "token_type_ids"}
    return {theirs: torch.from_numpy(batch[ours]).long() for ours, theirs in names.items()}


def fit(model, optimizer, config, train, loss_of: Callable[[dict], Any]) -> float:
    """Trains the PyTorch model on bertjax's batches, padded to the longest text; returns seconds per step.

    Args:
      model: the model.
      optimizer: torch's optimizer. `share` of a param group multiplies its learning rate.
      config: the config of bertjax's run.
      train: the training examples.
      loss_of: a batch of bertjax -> the loss of the model.
    """
    import torch

    from bertjax.data.loading.examples import TrainingOrder
    from bertjax.finetuning.task import count_steps
    from bertjax.training.optim.schedules import make_schedule

    order = TrainingOrder(train, config.batch_size, config.seed, config.model.max_position_embeddings)
    steps = count_steps(config, len(train))
    schedule = make_schedule(config.optimizer, steps)
    model.train()
    ends = [time.monotonic()]
    for step in range(steps):
        rows = order.rows(step)
        rows = rows[rows >= 0]
        loss = loss_of(train.batch(rows, int(train.lengths[rows].max())))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = group.get("share", 1.0) * float(schedule(step))
        optimizer.step()
        ends.append(time.monotonic())
    return float(np.median(np.diff(ends[::10]))) / 10


def train_theirs(name: str, config, dataset, mesh):
    """Returns (scores, seconds per step) of transformers' model and loss with torch's AdamW, on bertjax's batches."""
    import torch

    torch.manual_seed(config.seed)
    model = make_theirs(name, config, dataset)
    kernel, bias = draw_output_layer(config, mesh, dataset)
    layer = model.qa_outputs if name == "squad" else model.classifier
    layer.load_state_dict({"weight": torch.tensor(kernel.T), "bias": torch.tensor(bias)})
    decayed = [p for n, p in model.named_parameters() if not n.endswith("bias") and "LayerNorm" not in n]
    others = [p for n, p in model.named_parameters() if n.endswith("bias") or "LayerNorm" in n]
    groups = [{"params": decayed, "weight_decay": config.optimizer.weight_decay}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.learning_rate, eps=config.optimizer.epsilon)

    def loss_of(batch: dict):
        labels = torch.from_numpy(batch["labels"])
        if name == "squad":
            targets = {"start_positions": labels[:, 0].long(), "end_positions": labels[:, 1].long()}
        elif name == "conll":
            targets = {"labels": torch.where(torch.from_numpy(batch["weights"]) > 0, labels.long(), -100)}
        else:
            targets = {"labels": labels.long() if dataset.labels else labels.float()}
        return model(**tensors(batch), **targets).loss

    seconds = fit(model, optimizer, config, dataset.train, loss_of)
    split = dataset.dev[0]
    return split.score(split.decode(predict_theirs(model, split.examples))), seconds


def same_when_exported(name: str, config, dataset, workdir, folder) -> str:
    """Formats the number of dev examples with equal predictions in bertjax and, after the export, in transformers."""
    from bertjax.interop import conversion, pretrained

    conversion.convert(workdir, folder, "huggingface")
    examples = dataset.dev[0].examples
    config.init_checkpoint = str(folder)
    theirs = predict_theirs(make_theirs(name, config, dataset), examples)
    ours = predictor.predict(dataset.head, pretrained.read_pretrained(workdir), examples)
    axis = 0 if name == "squad" else -1  # SQuAD: the most likely start and end token; else the most likely label
    same = sum(np.array_equal(a.argmax(axis), b.argmax(axis)) for a, b in zip(ours, theirs))
    off = max(np.abs(a - b).max() for a, b in zip(ours, theirs))
    alike = f"{same} of {len(examples)} dev examples alike, " if dataset.labels or name == "squad" else ""
    return f"{alike}logits within {off:.1e}"


def table(results: list[dict]) -> str:
    """Formats scores in hundredths (mean ± standard deviation over the seeds) and median seconds per step."""
    groups = collections.defaultdict(dict)
    for result in results:
        groups[result["task"], result["by"]][result["seed"]] = result
    lines = [table_header(["task", "score", *SIDES, *(f"seconds a step, {by}" for by in SIDES)])]
    for name in EPOCHS:
        found = [groups[name, by] for by in SIDES]
        if not any(found):
            continue
        most = max(map(len, found))
        for metric in METRICS[name]:
            first = metric == METRICS[name][0]
            cells = [f"{name}, {EPOCHS[name]} epochs, {most} seeds" if first else "", metric]
            scores = [[100 * result["scores"][metric] for result in group.values()] for group in found]
            cells += map(mean_and_deviation, scores)
            cells += [_seconds(group) if first else "" for group in found]
            lines.append(table_row(cells))
    return "\n".join(lines)


def _seconds(group: dict[int, dict]) -> str:
    timed = [result["seconds"] for result in group.values() if not result.get("compiled")]
    timed = timed or [result["seconds"] for result in group.values()]  # the first run of a process compiles
    return f"{np.mean(timed):.3f}" if timed else ""


def parse(description: str, what: str, choices, sides, options: Mapping[str, dict] = types.MappingProxyType({})):
    """Returns the arguments of a resumable command, and the stored results. `what` names the choices.

    `options`: further arguments, with argparse's settings.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument(f"--{what}", default=",".join(choices))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--sides", default=",".join(sides))
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    arguments = parser.parse_args()
    return arguments, [json.loads(line) for line in arguments.output.open()] if arguments.output.exists() else []


def keep(result: dict, results: list[dict], output: pathlib.Path) -> None:
    """Adds a result to the results, appends the result to the file, and prints the result."""
    results.append(result)
    with output.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)


def main() -> None:
    arguments, results = parse(__doc__, "tasks", EPOCHS, SIDES)
    done = {(result["task"], result["seed"], result["by"]) for result in results}

    from bertjax.distributed.mesh import make_mesh, use_cpu_cores
    from bertjax.finetuning import run as finetuning_run

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        shorten(arguments.data.resolve(), folder)
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
        for name in arguments.tasks.split(","):
            wanted = [key for key in itertools.product([name], seeds, arguments.sides.split(",")) if key not in done]
            if not wanted:
                continue
            config = make_config(name, arguments.weights, folder)
            use_cpu_cores(config)
            config, _ = finetuning_run.resolve(config, None)
            mesh, programs = make_mesh(config), {}
            material = finetuning_run.load_inputs(config, folder, None)
            dataset = material.data
            print("\n".join(dataset.notes), flush=True)
            check_same_ids(name, config, dataset, arguments.weights)
            for _, seed, by in wanted:
                config = make_config(name, arguments.weights, folder, packing=by == "bertjax packed")
                config.dtype = "bfloat16" if by == "bertjax bfloat16" else "float32"
                config, _ = finetuning_run.resolve(config, None)
                config.seed = seed
                began = time.monotonic()
                if by == "transformers":
                    scores, seconds = train_theirs(name, config, dataset, mesh)
                    result = dict(task=name, seed=seed, by=by, scores=scores, seconds=seconds)
                    keep(result | dict(all=time.monotonic() - began), results, arguments.output)
                    continue
                compiled, run_folder = by not in programs, folder / f"{name}-{seed}-{by}"
                opened = finetuning_run.open_run(config, material)
                scores, seconds, programs[by] = train_ours(opened, run_folder, programs.get(by))
                took = time.monotonic() - began
                more = {}
                if seed == seeds[0] and by == "bertjax":
                    exported = folder / f"{name}-exported"
                    more["exported"] = same_when_exported(name, config, dataset, run_folder, exported)
                result = dict(task=name, seed=seed, by=by, scores=scores, seconds=seconds, all=took, compiled=compiled)
                keep(result | more, results, arguments.output)
    print(table(results))


if __name__ == "__main__":
    main()

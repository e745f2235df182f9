"""Ways to fine-tune in bertjax and in transformers (PyTorch; PEFT for LoRA): the same weights, batches and settings.

Rows: all params; layer_decay (0.8); lora (rank 8, query and value); rare, with 3 % positive training texts;
rare_balanced, the same with class weights; topics, several labels per text (kinds of entities in a CoNLL sentence);
student, with every third layer; taught, a student that also learns from the model of `all` with the same seed.

Command:  python -m experiments.benchmarks.ways_to_tune --weights=DIR --data=DATA --output=results.jsonl
          DIR: a BERT in Hugging Face's format, such as all-MiniLM-L6-v2. DATA: the folder with glue/ and conll2003/.
          The same command resumes, and prints the table of all results so far. --rows, --seeds and --sides select
Needs:    pip install torch transformers peft
Hardware: 2 CPU cores, about an hour
Score:    see RESULTS.md
"""

import csv
import itertools
import json
import pathlib
import tempfile

import numpy as np

from bertjax.launch.validate import validate
from experiments import classify
from experiments.benchmarks.beside_transformers import (
    draw_output_layer,
    fit,
    keep,
    parse,
    predict_theirs,
    tensors,
    train_ours,
)
from experiments.benchmarks.timing import mean_and_deviation, table_header, table_row

TEXTS, RARE = 2000, (60, 1940)  # training texts of SST-2; positive and negative texts of `rare`
SIDES = ("transformers", "bertjax")
EPOCHS, TEMPERATURE, SHARE = 2.0, 2.0, 0.7
ROWS = {
    "all": {},
    "layer_decay": {"optimizer.layer_decay": 0.8},
    "lora": {"lora.rank": 8, "lora.targets": "query,value", "optimizer.learning_rate": 1e-3},
    "rare": {},
    "rare_balanced": {"head.class_weights": "balanced"},
    "topics": {"data.multi_label": "list", "data.label": "topics"},
    "student": {"keep_layers": 2},
    "taught": {"keep_layers": 2, "distill.temperature": TEMPERATURE, "distill.weight": SHARE},
}
DATA_OF = {"rare": "rare", "rare_balanced": "rare", "topics": "topics"}  # all other rows: sst2


def write_data(data: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes tables of texts with labels: `sst2`, `rare`, `topics`."""
    with (data / "glue" / "SST-2" / "train.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    with (data / "glue" / "SST-2" / "dev.tsv").open() as file:
        dev = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    positive, negative = ([row for row in rows if row["label"] == label] for label in "10")
    sentences = {name: _topics(data / "conll2003" / f"eng.{name}") for name in ("train", "testa")}
    tables = {
        "sst2": (rows[:TEXTS], dev),
        "rare": (positive[: RARE[0]] + negative[: RARE[1]], dev),
        "topics": (sentences["train"][: 2 * TEXTS], sentences["testa"][:TEXTS]),
    }
    for name, parts in tables.items():
        (folder / name).mkdir()
        for part, found in zip(("train", "dev"), parts):
            lines = "".join(json.dumps(row) + "\n" for row in found)
            (folder / name / f"{part}.jsonl").write_text(lines)


def _topics(path: pathlib.Path) -> list[dict]:
    found = []
    for sentence in path.read_text().split("\n\n"):
        words = [line.split() for line in sentence.splitlines() if line and not line.startswith("-DOCSTART-")]
        if words:
            kinds = sorted({word[-1].partition("-")[2] for word in words} - {""})
            found.append({"sentence": " ".join(word[0] for word in words), "topics": kinds})
    return found


def make_config(row: str, weights: str, folder: pathlib.Path, seed: int, teacher: str):
    config = classify.get_config()
    config.data.path, config.init_checkpoint = str(folder / DATA_OF.get(row, "sst2")), weights
    config.update(dict(epochs=EPOCHS, log_every_steps=10, max_seq_length=64, seed=seed, dtype="float32"))
    config.data.text, config.optimizer.learning_rate = "sentence", 1e-4
    config.update_from_flattened_dict(ROWS[row] | ({"distill.teacher": teacher} if row == "taught" else {}))
    validate(config)
    return config


def make_theirs(row: str, config, dataset):
    """Returns transformers' model with bertjax's initial output layer, and the trained params."""
    import torch
    import transformers

    kind = {"problem_type": "multi_label_classification"} if row == "topics" else {}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        config.init_checkpoint, num_labels=len(dataset.labels), dtype="float32", **kind
    )
    if config.keep_layers:
        layers = model.bert.encoder.layer
        kept = [layers[(i + 1) * len(layers) // config.keep_layers - 1] for i in range(config.keep_layers)]
        model.bert.encoder.layer = torch.nn.ModuleList(kept)
    if row == "lora":
        import peft

        settings = peft.LoraConfig(
            task_type="SEQ_CLS", r=config.lora.rank, lora_alpha=config.lora.alpha, lora_dropout=config.lora.dropout,
            target_modules=["query", "value"], modules_to_save=["classifier", "pooler"],
        )  # fmt: skip
        return peft.get_peft_model(model, settings)
    return model


def groups_of(model, config) -> list[dict]:
    """Returns torch's param groups, each with its decay and its share of the learning rate."""
    found = {}
    layers = model.config.num_hidden_layers if not config.keep_layers else config.keep_layers
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_decayed = not name.endswith("bias") and "LayerNorm" not in name
            number = layers + 1 if "pooler" in name or "classifier" in name else 0
            if ".layer." in name:
                number = 1 + int(name.partition(".layer.")[2].partition(".")[0])
            share = config.optimizer.layer_decay ** max(0, layers - number)
            found.setdefault((is_decayed, share), []).append(param)
    decay = config.optimizer.weight_decay
    return [
        {"params": params, "weight_decay": decay if is_decayed else 0.0, "share": share}
        for (is_decayed, share), params in found.items()
    ]


def loss_of(row: str, config, logits, batch):
    import torch

    labels = torch.from_numpy(batch["labels"])
    if row == "topics":
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
    weight = None
    if row == "rare_balanced":
        counts = torch.tensor([RARE[1], RARE[0]], dtype=torch.float32)
        weight = counts.sum() / (2 * counts)
    hard = torch.nn.functional.cross_entropy(logits, labels.long(), weight)
    if row != "taught":
        return hard
    theirs = torch.from_numpy(batch["teacher_logits"])
    soft = torch.nn.functional.kl_div(
        torch.log_softmax(logits / TEMPERATURE, -1), torch.softmax(theirs / TEMPERATURE, -1), reduction="batchmean"
    )
    return (1 - SHARE) * hard + SHARE * TEMPERATURE**2 * soft


def train_theirs(row: str, config, dataset, mesh):
    """Returns the scores and the seconds per step."""
    import torch

    torch.manual_seed(config.seed)
    model = make_theirs(row, config, dataset)
    kernel, bias = draw_output_layer(config, mesh, dataset)
    state = {"weight": torch.tensor(kernel.T), "bias": torch.tensor(bias)}
    saved = model.base_model.model.classifier.modules_to_save["default"] if row == "lora" else model.classifier
    saved.load_state_dict(state)
    optimizer = torch.optim.AdamW(groups_of(model, config), lr=1.0, eps=config.optimizer.epsilon)

    def loss_of_batch(batch: dict):
        return loss_of(row, config, model(**tensors(batch)).logits, batch)

    seconds, split = fit(model, optimizer, config, dataset.train, loss_of_batch), dataset.dev[0]
    return split.score(split.decode(predict_theirs(model, split.examples))), seconds


def table(results: list[dict]) -> str:
    """Formats scores in hundredths (mean ± standard deviation over the seeds) and seconds per step."""
    lines = [table_header(["way", "score", *SIDES, *(f"seconds a step, {by}" for by in SIDES)])]
    for row in ROWS:
        sides = [[each for each in results if (each["row"], each["by"]) == (row, by)] for by in SIDES]
        if any(sides):
            metric = "accuracy" if row not in DATA_OF else "macro_f1"
            scores = [[100 * each["scores"][metric] for each in side] for side in sides]
            cells = [*map(mean_and_deviation, scores)]
            cells += [f"{np.median([each['seconds'] for each in side]):.3f}" if side else "" for side in sides]
            lines.append(table_row([row, metric, *cells]))
    return "\n".join(lines)


def main() -> None:
    arguments, results = parse(__doc__, "rows", ROWS, SIDES)
    done = {(result["row"], result["seed"], result["by"]) for result in results}

    from bertjax.distributed.mesh import make_mesh, use_cpu_cores
    from bertjax.finetuning import run as finetuning_run

    runs = arguments.output.with_suffix(".runs")  # the models of `all`, the teachers
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        write_data(arguments.data.resolve(), folder)
        wanted = itertools.product(
            arguments.rows.split(","), map(int, arguments.seeds.split(",")), arguments.sides.split(",")
        )
        for row, seed, by in (key for key in wanted if key not in done):
            config = make_config(row, arguments.weights, folder, seed, str(runs / f"all-{seed}"))
            use_cpu_cores(config)
            config, _ = finetuning_run.resolve(config, None)
            mesh, own = make_mesh(config), runs / f"{row}-{seed}" if row == "all" else folder / f"{row}-{seed}"
            own.mkdir(parents=True, exist_ok=True)
            material = finetuning_run.load_inputs(config, own, None)
            if by == "transformers":
                scores, seconds = train_theirs(row, config, material.data, mesh)
            else:
                scores, seconds, _ = train_ours(finetuning_run.open_run(config, material), own, None)
            keep(dict(row=row, seed=seed, by=by, scores=scores, seconds=seconds), results, arguments.output)
    print(table(results))


if __name__ == "__main__":
    main()

"""The paper's comparisons at the scale of the available hardware: SCALE/NAME, such as cores/ltr.

The scales and all names are below. `python -m experiments.ablations` pre-trains and fine-tunes all models.

Command:  python -m bertjax.main --config=experiments/ablations/scaled.py:cores/ltr --config.data.corpus=texts/
Hardware: cores: two CPU cores; gpu: one GPU (only the tables of equal time were run)
Paper:    see the experiments in the folder of this file
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping

from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.defaults import named_stages, stage
from bertjax.config.model_config import model_size

FOLDER = pathlib.Path(__file__).parent
MASKINGS = ("80-10-10", "100-0-0", "80-0-20", "80-20-0", "0-20-80", "0-0-100")
FEATURES = ("embeddings", "second_to_last", "last", "weighted_sum_last_four", "concat_last_four", "weighted_sum_all")


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of models, data and training.

    Args:
      size: LAYERS-HIDDEN-HEADS of the model in all tables except the table of sizes.
      sizes: the sizes of the table of sizes.
      stages: (steps, sequence length) of each stage.
      short_steps: steps of the first stage in models with only this stage.
      files: number of files of each corpus.
      pretraining, fine_tuning: config fields of all runs, by name.
      equal_time: config fields of pre-training in the tables of equal time (`race.py`).
      tasks: config fields of fine-tuning, by task.
      short_tasks: config fields of fine-tuning for models with only the first stage, by task.
      lstm_size: size of a BiLSTM on top.
      sentences, articles: number of the first training examples of SST-2 and SQuAD.
      checkpoints: steps of the checkpoints in the table of steps, without the last checkpoint.
    """

    size: str
    sizes: tuple[str, ...]
    stages: tuple[tuple[int, int], ...]
    short_steps: int
    files: int
    pretraining: Mapping
    equal_time: Mapping
    fine_tuning: Mapping
    tasks: Mapping[str, Mapping]
    short_tasks: Mapping[str, Mapping]
    lstm_size: int
    sentences: int
    articles: int
    seeds: int
    checkpoints: tuple[int, ...]

    def corpora(self, folder: pathlib.Path) -> list[pathlib.Path]:
        """Returns the first files of each corpus in the folder, such as CORPUS.txt or CORPUS-NUMBER.txt.xz.

        Raises `UserError` if the folder has no such file.
        """
        return [path for files in _corpora(folder).values() for path in files[: self.files]]

    def heldout(self, folder: pathlib.Path) -> list[pathlib.Path]:
        """Returns the last file of each corpus in the folder. Raises `UserError` if it is among the first files."""
        last = [files[-1] for files in _corpora(folder).values()]
        if used := set(last) & set(self.corpora(folder)):
            raise UserError(f"{min(used)}: is trained on; add files: more than {self.files} of each corpus")
        return last


def _corpora(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Returns the files of each corpus. Raises `UserError` if the folder has no corpus."""
    found: dict[str, list[pathlib.Path]] = {}
    for path in sorted(folder.glob("*.txt*")):
        found.setdefault(re.fullmatch(r"(.+?)(-\d+)?\.txt.*", path.name)[1], []).append(path)
    if not found:
        raise UserError(f"{folder}: has no *.txt or *.txt.xz; choose a folder with text files")
    return found


SCALES = {
    # About 45 minutes per model on two CPU cores, or 10 with only the first stage. This recipe beats random weights on
    # words, and by less on sentences: RESULTS.md.
    "cores": Scale(
        size="4-128-2",
        sizes=("1-128-2", "2-64-1", "2-128-2", "4-64-1", "4-128-2", "4-192-3"),
        stages=((8_000, 32), (2_500, 128)),
        short_steps=4_000,
        files=2,
        pretraining={
            "batch_size": 64,
            "model.vocab_size": 8192,
            "model.max_position_embeddings": 256,
            "model.initializer_range": 0.05,  # BERT-base's initialization, scaled to a hidden size of 128
            "model.hidden_dropout_prob": 0.0,  # no text is read more than a few times
            "model.attention_probs_dropout_prob": 0.0,
            "optimizer.learning_rate": 1e-3,
            "optimizer.warmup_steps": 500,
            "optimizer.bias_correction": True,
            "eval.max_sequences": 2048,
        },
        equal_time={"optimizer.learning_rate": 2e-3},
        fine_tuning={"optimizer.learning_rate": 3e-4, "model.hidden_dropout_prob": 0.1},
        tasks={
            "conll": {"optimizer.learning_rate": 1e-3, "max_seq_length": 128},
            "conll-32": {"optimizer.learning_rate": 1e-3, "max_seq_length": 32},
            "features": {
                "optimizer.learning_rate": 1e-3,
                "epochs": 3.0,
                "max_seq_length": 128,
                "head.lstm_size": 128,
            },
            "squad": {
                "epochs": 2.0,
                "max_seq_length": 128,
                "data.doc_stride": 64,
                "data.max_query_length": 32,
            },
        },
        short_tasks={"sst2": {"epochs": 1.0}},
        lstm_size=128,
        sentences=67_349,  # all: with 10,000, pre-training made no difference
        articles=6,
        seeds=3,
        checkpoints=(2000, 4000, 8000),
    ),
    # Minutes of one GPU per model: the size and rate of BERT small and ELECTRA small (Clark et al. 2020, table 6).
    "gpu": Scale(
        size="12-256-4",
        sizes=("4-256-4", "6-256-4", "12-128-2", "12-256-4"),
        stages=((40_000, 32), (10_000, 128)),
        short_steps=40_000,
        files=3,
        pretraining={
            "batch_size": 512,
            "model.vocab_size": 30_522,
            "model.max_position_embeddings": 256,
            "optimizer.learning_rate": 5e-4,
            "optimizer.warmup_steps": 5_000,
            "optimizer.bias_correction": True,
            "eval.max_sequences": 4096,
        },
        # A calibration is too short to unroll layers, and must time the same program as the training.
        equal_time={"checkpoint.every_steps": 10_000, "unroll": "no"},
        fine_tuning={"optimizer.learning_rate": 3e-4},
        tasks={
            "conll": {"max_seq_length": 128},
            "conll-32": {"max_seq_length": 32},
            "features": {"optimizer.learning_rate": 1e-3, "max_seq_length": 128, "head.lstm_size": 256},
            "squad": {"max_seq_length": 128, "data.doc_stride": 64, "data.max_query_length": 32},
        },
        short_tasks={"sst2": {"epochs": 1.0}},
        lstm_size=256,
        sentences=67_349,
        articles=442,
        seeds=3,
        checkpoints=(10_000, 20_000, 40_000),
    ),
    # Minutes of work, to check that everything runs.
    "trial": Scale(
        size="4-32-2",
        sizes=("4-32-2", "2-32-2"),
        stages=((30, 32), (10, 64)),
        short_steps=30,
        files=1,
        pretraining={
            "batch_size": 16,
            "model.vocab_size": 3000,
            "model.max_position_embeddings": 128,
            "optimizer.learning_rate": 1e-3,
            "optimizer.warmup_steps": 5,
            "eval.max_sequences": 64,
        },
        equal_time={"optimizer.learning_rate": 2e-3},
        fine_tuning={"epochs": 1.0, "max_seq_length": 32, "optimizer.learning_rate": 1e-3},
        tasks={
            "squad": {"max_seq_length": 64, "data.max_query_length": 16, "data.doc_stride": 32},
            "features": {"head.lstm_size": 16},
        },
        short_tasks={},
        lstm_size=16,
        sentences=500,
        articles=2,
        seeds=2,
        checkpoints=(20,),
    ),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A pre-trained model.

    Args:
      name: name of the workdir.
      experiment: FILE:ARGUMENT in the folder of this file, or the name of a shipped experiment.
      records: pairs | order | sentences | bytes.
      changes: config fields that differ from the scale, by name.
      tasks: config fields of fine-tuning that differ from the scale, by name.
      is_short: whether the model has only the first stage and is fine-tuned in sequences of this length, as in the
        tables with many models (sizes, maskings and systems).
      steps: steps of the only stage; None: the scale's steps.
      pieces: number of its tokens per token of the other models. Sequences are longer by this factor, and a step has
        fewer sequences.
    """

    name: str
    experiment: str
    records: str = "pairs"
    changes: Mapping = dataclasses.field(default_factory=dict)
    tasks: Mapping = dataclasses.field(default_factory=dict)
    is_short: bool = False
    steps: int | None = None
    pieces: int = 1


BERT = Model("bert", "objective.py:bert")
# BERT's initial weights: one step at a rate of nearly 0.
RANDOM = Model("random", "objective.py:bert", changes={"optimizer.learning_rate": 1e-12}, steps=1)
BERT_SHORT = Model("bert_short", "objective.py:bert", is_short=True)
NO_NSP = Model("no_nsp", "objective.py:no_nsp", "sentences")
LTR = Model("ltr", "objective.py:ltr", "sentences")
GPT = Model("gpt", "../gpt.py:gpt2", "sentences", is_short=True)
ELMO = Model("elmo", "../elmo.py", "sentences", {"packing": False}, {"packing": False}, is_short=True)
BYTES = Model(
    "bytes",
    "../bytes.py",
    "bytes",
    {"model.vocab_size": 261},
    is_short=True,
    pieces=4,
)


@dataclasses.dataclass(frozen=True)
class Task:
    """A fine-tuning task: its experiment, the folder of its data with the files in it, and the metric of the table."""

    name: str
    experiment: str
    data: str
    files: tuple[str, str]
    metric: str


def _glue(name: str, task: str, metric: str) -> Task:
    return Task(name, f"glue:{task}", "glue", (f"{name}/train.tsv", f"{name}/dev.tsv"), metric)


TAGGED = ("conll2003", ("eng.train", "eng.testa"))  # data of CoNLL


TASKS = {
    "sst2": _glue("SST-2", "sst2", "accuracy"),
    "mrpc": _glue("MRPC", "mrpc", "accuracy"),
    "stsb": _glue("STS-B", "stsb", "spearman"),
    "conll": Task("CoNLL", "ner", *TAGGED, "f1"),
    # For checkpoints of the first stage, which has no later positions.
    "conll-32": Task("CoNLL, in sequences of 32", "ner", *TAGGED, "f1"),
    "squad": Task("SQuAD", "squad:v1.1", "squad", ("train-v1.1.json", "dev-v1.1.json"), "f1"),
    **{
        f"features-{name}": Task(f"CoNLL, {name}", f"features:{name}", *TAGGED, "f1")
        for name in (*FEATURES, "weighted_sum_with_embeddings")
    },
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model that is fine-tuned on a task with several seeds.

    Args:
      step: step of the checkpoint; 0: the last checkpoint.
      has_lstm: whether the head has a BiLSTM.
    """

    model: Model
    task: str
    step: int = 0
    has_lstm: bool = False

    @property
    def name(self) -> str:
        """The name of the workdir."""
        variant = f"@{self.step}" * bool(self.step) + "_bilstm" * self.has_lstm
        return f"{self.model.name}{variant}-{self.task}"

    def settings(self, scale: Scale) -> dict:
        """Returns the overrides of the task's experiment."""
        is_frozen = self.task.startswith("features-")
        fields = {**scale.fine_tuning, **scale.tasks.get("features" if is_frozen else self.task, {})}
        if self.has_lstm:
            fields["head.lstm_size"] = scale.lstm_size
        elif not is_frozen:
            fields["packing"] = True
        if self.model.is_short:  # the model has not learned later positions
            fields["max_seq_length"] = scale.stages[0][1] * self.model.pieces
            fields |= scale.short_tasks.get(self.task, {})
        return {**fields, **self.model.tasks}


# The rows of each table, and its columns (tasks).
ROWS = {
    "objective": {"random": RANDOM, "BERT": BERT, "no NSP": NO_NSP, "left to right": LTR, "left to right, BiLSTM": LTR},
    "masking": {name: Model(f"masking-{name}", f"masking.py:{name}", is_short=True) for name in MASKINGS}
    | {MASKINGS[0]: BERT_SHORT},
    "systems": {
        "BERT": BERT_SHORT,
        "BERT, sinusoidal positions": Model("sinusoidal", "positions.py:sinusoidal", is_short=True),
        "BERT, no positions": Model("none", "positions.py:none", is_short=True),
        "GPT-2's form": GPT,
        "ELMo's form": ELMO,
        "BERT, of bytes": BYTES,
        "ALBERT's sentence order": Model("order", "objective.py:order", "order", is_short=True),
    },
}
COLUMNS = {
    "objective": ("sst2", "mrpc", "stsb", "conll", "squad"),
    "size": ("sst2", "conll"),
    "steps": ("conll-32",),
    "masking": ("conll", "features-concat_last_four"),
    "features": ("conll", *(f"features-{name}" for name in FEATURES)),
    "systems": ("sst2", "conll", "features-weighted_sum_with_embeddings"),
}
TABLES = tuple(COLUMNS)


def models(table: str, scale: Scale) -> dict[str, Model]:
    """Returns the rows of a table by their titles."""
    if table == "size":
        changes = {size: {f"model.{field}": value for field, value in model_size(size).items()} for size in scale.sizes}
        found = {
            size: Model(f"size-{size}", f"size.py:{size}", changes=changes[size], is_short=True) for size in scale.sizes
        }
        return found | ({scale.size: BERT_SHORT} if scale.size in found else {})
    return {"steps": {"masked words": NO_NSP, "left to right": LTR}, "features": {"BERT": BERT}}.get(table) or ROWS[
        table
    ]


def cells(table: str, scale: Scale) -> Iterator[tuple[str, Cell]]:
    """Yields (title of the row, cell) of a table, row by row."""
    for title, model in models(table, scale).items():
        for step in (*scale.checkpoints, 0) if table == "steps" else (0,):
            for task in COLUMNS[table]:
                yield title, Cell(model, task, step, has_lstm="BiLSTM" in title)


def get_config(which="cores/bert"):
    scale, _, name = which.partition("/")
    if scale not in SCALES:
        raise UserError(f"unknown scale {scale!r}: choose one of {', '.join(SCALES)}")
    known = {model.name: model for table in TABLES for model in models(table, SCALES[scale]).values()}
    if name not in known:
        raise UserError(f"unknown model {name!r}: choose one of {', '.join(known)}")
    return _config(SCALES[scale], known[name])


def _config(scale: Scale, model: Model):
    file, colon, argument = model.experiment.partition(":")
    config = experiments.load(f"{FOLDER / file}{colon}{argument}").unlock()
    fields = {f"model.{field}": value for field, value in model_size(scale.size).items()}
    fields |= {**scale.pretraining, **model.changes}
    fields["batch_size"] //= model.pieces
    stages = dict(zip(("short", "long"), scale.stages))
    if model.is_short or model.steps:
        stages = {"short": (model.steps or scale.short_steps, scale.stages[0][1])}
    config.stages = named_stages(
        **{
            name: stage(steps, length * model.pieces, -(-15 * length * model.pieces // 100))
            for name, (steps, length) in stages.items()
        }
    )
    every = min(scale.checkpoints[0], model.steps or scale.checkpoints[0])
    config.packing = True
    config.data.update(dupe_factor=1, layout="compact")
    config.tokenizer.lowercase = False
    config.eval.update(every_steps=every, fill_masks=())
    config.checkpoint.update(every_steps=every, keep_every=every)
    for name, value in fields.items():
        section, _, field = name.rpartition(".")
        (config[section] if section else config)[field] = value
    return config.lock()

"""What a workdir says about its run: `config.json`, the tokenizer, `commands.txt` and, at its end, `report.txt`.

`RunInfo` holds the content of `config.json`; `differences` compares two infos.
"""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, NotRequired, TypedDict

import ml_collections
import msgspec
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, read_whole, write_whole
from bertjax.config.defaults import common_config, pretraining_config
from bertjax.config.limits import DTYPES, one_of
from bertjax.config.model_config import fields_of
from bertjax.models import families
from bertjax.models.validate import validate_model
from bertjax.objectives.parsing import terms_of_run
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer

CONFIG, REPORT = "config.json", "report.txt"
# The form of `CONFIG`, and of the checkpoints beside it. One more when an earlier version would read them wrongly.
FORMAT = 1
PAGE = "report.html"  # the page about a run
COMMANDS = "commands.txt"  # a line for each start of training: its date, a tab, the command
SAMPLES = "dev_samples.json"  # a few examples of the dev set with the predictions of the best checkpoint
SAMPLED, LONGEST = 10, 500  # how many examples, and characters of each text
RUNS, RESULT = "runs", "result.json"  # the folder of a search's trials, and the file of a finished one
# The fields that determine the result of a run; the others (mesh, logging, remat, ...) may change silently.
DECISIVE = ("task", "branch_from", "adapt", "objective", "objectives", "z_loss", "seed", "batch_size", "epochs",
            "max_seq_length", "packing", "stages", "data", "head", "loss", "distill", "optimizer", "freeze_layers",
            "keep_layers", "lora", "model", "dtype", "grad_dtype", "init_checkpoint")  # fmt: skip
# Model families by the `model.encoder` of older runs.
FAMILIES_BEFORE = {"transformer": "bert", "lstms": "lstms"}


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The content of `config.json`.

    Args:
      config: the config of the run, locked.
      architecture: the transformers class of a fine-tuned model; empty after pre-training.
      labels: names of the rows of the output layer; None if not known yet.
      problem_type: what transformers calls the problem of a classifier whose rows do not say it.
      tokenizer: `kind`, `lowercase` and `fingerprint` of the run's tokenizer; None if there is none, or not known yet.
      train_examples: number of training examples of fine-tuning, which determines the total steps; 0 if unknown.
      total_steps: the updates of the whole run; 0 if unknown, such as in runs of older versions.
      fingerprints: the fingerprints of the run's data, by the names of files or records; None if they are not known, or
        not yet.
    """

    config: ml_collections.ConfigDict
    architecture: str = ""
    labels: tuple[str, ...] | None = None
    tokenizer: dict | None = None
    train_examples: int = 0
    fingerprints: dict[str, str] | None = None
    problem_type: str = ""
    total_steps: int = 0


class Difference(NamedTuple):
    """A field in which two infos differ; a fatal difference prevents resuming."""

    field: str
    old: object
    new: object
    is_fatal: bool

    def __str__(self) -> str:
        return f"{self.field} = {self.new!r} (was {self.old!r})"


class _UsedTokenizer(TypedDict):
    kind: tokenizer.Kind
    lowercase: bool
    fingerprint: str


class _Beside(TypedDict, total=False):
    """What `config.json` has beside the config."""

    format: Annotated[int, msgspec.Meta(ge=1)]
    architecture: str
    labels: tuple[str, ...]
    problem_type: str
    train_examples: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    total_steps: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    used_tokenizer: _UsedTokenizer
    fingerprints: dict[str, str]


class Finished(TypedDict):
    """`RESULT`; `baseline`: the best score, by `metric`, of a prediction that is always the same."""

    scores: dict[str, float | None]
    failed: bool
    metric: NotRequired[str]
    baseline: NotRequired[float]


class DevSample(TypedDict):
    """An example of the dev set, as the page about a run shows it."""

    text: str
    label: str
    prediction: str


def read_info(workdir: epath.PathLike) -> RunInfo | None:
    """Reads what a workdir says about its run; None if it has none.

    Raises `UserError` if it is damaged, or of a later format.
    """
    path = epath.Path(workdir) / CONFIG
    if not path.exists():
        return None
    content = read_json(path)
    number = content.get("format") if isinstance(content, dict) else None
    if type(number) is int and number > FORMAT:
        raise UserError(
            f"{path}: is of format {number}, and this bertjax reads up to {FORMAT}; install a newer bertjax"
        )
    try:
        beside, _ = msgspec.convert(content, _Beside), content["model"]
        content = {name: value for name, value in content.items() if name not in _Beside.__annotations__}
        config = (pretraining_config() if "stages" in content else common_config()).unlock()
        if "stages" in content:  # replaces the default stages instead of merging with them
            config.stages = ml_collections.ConfigDict(content.pop("stages"))
        if "encoder" in content["model"]:  # the name of `family` until the end of 2026
            content["model"]["family"] = FAMILIES_BEFORE[content["model"].pop("encoder")]
        if "family" in content["model"]:
            config.model = families.model_fields(content["model"]["family"])
        config.update(content)
        validate_model(config)
        one_of(config, "dtype", DTYPES)
        families.config_of(config)  # no other fields
        terms_of_run(config)
    except (ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        if isinstance(error, UserError) and "config.model.family" in str(error):
            raise UserError(f"{path}: {error}") from None  # nobody has registered it
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"{path}: damaged, or written by another version or program ({reason})") from None
    beside.pop("format", None)  # earlier runs have none
    labels, used_tokenizer = beside.pop("labels", None), beside.pop("used_tokenizer", None)
    return RunInfo(config.lock(), labels=labels, tokenizer=used_tokenizer, **beside)


def require_info(workdir: epath.PathLike) -> RunInfo:
    """As `read_info`. Raises `UserError` if it has none."""
    info = read_info(workdir)
    if info is None:
        raise UserError(f"no {epath.Path(workdir) / CONFIG}: {str(workdir)!r} is not the workdir of a run")
    return info


def write_info(workdir: epath.PathLike, info: RunInfo, tokenizer: Tokenizer | None) -> None:
    """Writes `config.json` and the tokenizer; with the checkpoints, they are all that is needed to use the model."""
    content = {"format": FORMAT, **json.loads(info.config.to_json_best_effort())}
    if info.architecture:
        content |= {"architecture": info.architecture, "labels": list(info.labels or ())}
    if info.problem_type:
        content["problem_type"] = info.problem_type
    if info.train_examples:
        content["train_examples"] = info.train_examples
    if info.total_steps:
        content["total_steps"] = info.total_steps
    if info.fingerprints:
        content["fingerprints"] = info.fingerprints
    if tokenizer is not None:
        tokenizer.save(workdir)
        content["used_tokenizer"] = tokenizer_entry(tokenizer)
    write_whole(epath.Path(workdir) / CONFIG, json.dumps(content, indent=1) + "\n")


def tokenizer_entry(tokenizer: Tokenizer) -> dict:
    """Returns the value of `RunInfo.tokenizer`."""
    return {"kind": tokenizer.kind, "lowercase": tokenizer.lowercase, "fingerprint": tokenizer.fingerprint}


def load_tokenizer(workdir: epath.PathLike, info: RunInfo) -> Tokenizer | None:
    """Loads the tokenizer of a run; None if it was converted from a checkpoint without one.

    Raises `UserError` if it is not the one that the run was trained with.
    """
    if info.tokenizer is None:
        return None
    kind = info.tokenizer["kind"]
    path = epath.Path(workdir) / tokenizer.KINDS[kind].filename
    found = tokenizer.load(kind, path, info.tokenizer["lowercase"])
    if found.fingerprint != info.tokenizer["fingerprint"]:
        raise UserError(f"{path}: is not the vocabulary that {CONFIG} beside it names; copy it again")
    return found


def differences(before: RunInfo, now: RunInfo, identity: Sequence[str] = ()) -> list[Difference]:
    """Returns the decisive fields in which two infos differ; labels, tokenizer and data if both have them.

    Args:
      identity: fields that, besides `task`, identify the task. A difference in them, the model's size, the optimizer's
        name and options, what is frozen, the labels, the tokenizer or the data is fatal.
    """
    fixed = {"task", "branch_from", "distill.teacher", "freeze_layers", "keep_layers", *identity}
    fixed |= {"optimizer.name", "optimizer.options"}
    old, new = _leaves(before.config), _leaves(now.config)
    config_class = families.FAMILIES.get(before.config.model.family).config_class
    may_change = {f"model.{name}" for name in fields_of(config_class, "")}
    one, other = map(_frozen_groups, (before.config, now.config))
    found = []
    for field in dict.fromkeys((*new, *old)):
        if old.get(field) != new.get(field):
            freezes = field.startswith("optimizer.groups.") and one != other
            averages = field == "optimizer.average" and not (old.get(field) and new.get(field))  # one has no average
            settings = field.startswith("objectives.")
            updates = field.startswith("lora.") and field != "lora.dropout"
            is_fixed = (
                averages
                or freezes
                or updates
                or settings
                or field in fixed
                or (field.startswith("model.") and field not in may_change)
            )
            found.append(Difference(field, old.get(field), new.get(field), is_fixed))
    if 0 not in (before.train_examples, now.train_examples) and before.train_examples != now.train_examples:
        found.append(Difference("train_examples", before.train_examples, now.train_examples, is_fatal=False))
    for field in ("labels", "tokenizer"):
        one, other = getattr(before, field), getattr(now, field)
        if field == "tokenizer" and one and other:  # the fingerprint also tells whether it lower-cases
            one, other = one["fingerprint"], other["fingerprint"]
        if one is not None and other is not None and one != other:
            found.append(Difference(field, one, other, True))
    if before.fingerprints and now.fingerprints and before.fingerprints != now.fingerprints:
        found.append(Difference("fingerprints", before.fingerprints, now.fingerprints, True))
    return found


def _frozen_groups(config) -> set[str]:
    """Returns the patterns of the groups that are not trained."""
    return {group.params for group in config.optimizer.groups.values() if group.learning_rate_factor == 0}


def refuse(workdir: epath.PathLike, found: Sequence[Difference]) -> None:
    """Raises `UserError` if a difference is fatal."""
    for difference in found:
        if difference.is_fatal:
            raise UserError(_refusal(workdir, difference))


def changed_data(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the names of what both have, with other fingerprints."""
    return [name for name in before if name in now and before[name] != now[name]]


def _refusal(workdir: epath.PathLike, difference: Difference) -> str:
    field, old, new, _ = difference
    if field == "tokenizer":
        return f"{workdir} holds a run with another vocabulary; choose another --workdir"
    if field == "labels":
        return (
            f"{workdir} holds a run with the labels {', '.join(old[:8])}, but the data has {', '.join(new[:8])}; "
            f"choose another --workdir"
        )
    if field == "fingerprints":
        gone, more = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
        parts = [
            f"{', '.join(names)} {what}"
            for names, what in ((changed_data(old, new), "changed"), (gone, "no longer read"), (more, "new"))
            if names
        ]
        return (
            f"{workdir} holds a run on other data ({'; '.join(parts)}), and would mix both; bring the data back as it "
            f"was, or choose another --workdir"
        )
    return f"config.{field} = {new!r}: {workdir} holds a run with {old!r}; choose another --workdir"


def _leaves(config: ml_collections.ConfigDict) -> dict[str, object]:
    """Returns the decisive fields by dotted name, with JSON values."""
    content = json.loads(config.to_json_best_effort())
    # Values for runs from before there were these fields.
    leaves = {"head.lstm_size": 0, "head.lstm_layers": 1, "head.class_weights": "", "head.label_smoothing": 0.0}
    leaves |= {"data.multi_label": "", "data.on_bad_answer": "stop", "data.windows": "", "data.heldout_seed": 0}
    leaves |= {"keep_layers": 0, "data.join": "spaces", "data.dev.ignore_identical_ids": False}
    leaves |= {"distill.teacher": "", "distill.temperature": 2.0, "distill.weight": 0.5}

    def walk(name: str, value) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                walk(f"{name}.{key}", value[key])
        else:
            leaves[name] = value

    for section in DECISIVE:
        if section in content:
            walk(section, content[section])
    if not leaves.get("lora.rank"):  # none, as in runs from before there were these fields
        leaves = {name: value for name, value in leaves.items() if not name.startswith("lora.")}
    leaves["eval.patience"] = content.get("eval", {}).get("patience", 0)
    leaves.pop("model.attention", None)  # how it is computed changes rounding only
    return leaves


def note_command(workdir: epath.PathLike) -> None:
    """Appends the date and the command of this process to `COMMANDS`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else ""
    # `bertjax train` and `python -m bertjax.main` run this module.
    program = ["python", "-m", "bertjax.main" if name == "bertjax.cli.train" else name] if name else sys.argv[:1]
    path, date = epath.Path(workdir) / COMMANDS, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    command = shlex.join([*program, *sys.argv[1:]]).replace("\n", " ").encode(errors="backslashreplace")
    write_whole(path, (read_whole(path) if path.exists() else b"") + f"{date}\t".encode() + command + b"\n")


def read_commands(workdir: epath.PathLike) -> list[tuple[str, str]]:
    """Returns the dates and the commands that trained a run; none if an older version trained it."""
    path = epath.Path(workdir) / COMMANDS
    lines = read_whole(path).decode(errors="replace").split("\n") if path.exists() else []
    return [(date, command) for date, _, command in (line.partition("\t") for line in lines) if command]


def samples(count: int) -> list[int]:
    """Returns the numbers of up to `SAMPLED` of so many examples, spread evenly."""
    return sorted({number * count // SAMPLED for number in range(SAMPLED)}) if count else []


def samples_file(rows: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """Returns {name: content} of a file for the workdir with (text, label, prediction) of some examples."""
    named = [{name: cell[:LONGEST] for name, cell in zip(DevSample.__annotations__, row)} for row in rows]
    return {SAMPLES: json.dumps(named, ensure_ascii=False, indent=1) + "\n"}


def read_samples(workdir: epath.PathLike) -> list[DevSample]:
    """Returns the examples of `samples_file`; none if the run has no such file. Raises `UserError` if it is damaged."""
    path = epath.Path(workdir) / SAMPLES
    return read_json(path, list[DevSample]) if path.exists() else []


def read_report(workdir: epath.PathLike) -> str | None:
    """Returns the report of a run; None if it has not finished."""
    path = epath.Path(workdir) / REPORT
    return read_whole(path).decode(errors="replace").rstrip("\n") if path.exists() else None


def write_report(workdir: epath.PathLike, text: str) -> None:
    write_whole(epath.Path(workdir) / REPORT, text + "\n")


def delete_report(workdir: epath.PathLike) -> None:
    """Deletes the report of a run that is about to be extended."""
    (epath.Path(workdir) / REPORT).unlink(missing_ok=True)

"""The files of a workdir except its checkpoints: `config.json`, the tokenizer, `commands.txt`, `report.txt`, ...

`RunInfo` is the content of `config.json`. `differences` compares two infos.
"""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import msgspec
from etils import epath
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, read_whole, write_whole
from bertjax.config.defaults import common_config, pretraining_config
from bertjax.config.limits import DTYPES, one_of
from bertjax.config.model_config import fields_with_roles
from bertjax.models import families
from bertjax.models.validate import validate_model
from bertjax.objectives.parsing import terms_of_run
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer

CONFIG, REPORT = "config.json", "report.txt"
# The format version of `CONFIG` and of the checkpoints. Increase this number if older code would misread new files.
FORMAT = 1
HTML_REPORT = "report.html"  # the HTML report of a run
COMMANDS = "commands.txt"  # one line per start of training: the date, a tab, the command
SAMPLES = "dev_samples.json"  # a few examples of the dev set with the predictions of the best checkpoint
MAX_SAMPLES, MAX_SAMPLE_LENGTH = 10, 500  # examples in `SAMPLES`, and characters per text
TRIALS, TRIAL_RESULT = "runs", "result.json"  # the folder of the trials of a sweep, and the file of a finished trial
# Fields that determine the result of a run. Other fields (mesh, logging, remat, ...) may change when a run resumes.
RESULT_FIELDS = ("task", "branch_from", "adapt", "objective", "objectives", "z_loss", "seed", "batch_size", "batch_by",
            "epochs", "max_seq_length", "packing", "stages", "data", "head", "loss", "distill", "optimizer",
            "freeze_layers", "keep_layers", "lora", "model", "dtype", "grad_dtype", "init_checkpoint")  # fmt: skip
# Value of `model.encoder` in older runs -> value of `model.family`, which replaces this field.
OLD_ENCODERS = {"transformer": "bert", "lstms": "lstms"}


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The content of `config.json`.

    Args:
      config: the config of the run, locked.
      architecture: the transformers class of a fine-tuned model; empty after pre-training.
      labels: the label names, in the order of the outputs of the classifier; None before the data is read.
      tokenizer: `kind`, `lowercase` and `fingerprint` of the tokenizer; None before the tokenizer is made.
      train_examples: the number of training examples of fine-tuning, which determines the total steps; 0 if unknown.
      fingerprints: {file or records name: fingerprint} of the training data; None if unknown.
      problem_type: `problem_type` of a classifier in transformers; empty if transformers infers the type from the
        number of labels.
      total_steps: the number of updates of the whole run; 0 if unknown, such as in runs of older versions.
    """

    config: ConfigDict
    architecture: str = ""
    labels: tuple[str, ...] | None = None
    tokenizer: dict | None = None
    train_examples: int = 0
    fingerprints: dict[str, str] | None = None
    problem_type: str = ""
    total_steps: int = 0


class Difference(NamedTuple):
    """A field with different values in two infos. A fatal difference prevents a run from being resumed."""

    field: str
    old: Any
    new: Any
    is_fatal: bool

    def __str__(self) -> str:
        """Returns the field with the new and the old value."""
        return f"{self.field} = {self.new!r} (was {self.old!r})"


class _UsedTokenizer(TypedDict):
    kind: tokenizer.Kind
    lowercase: bool
    fingerprint: str


class _InfoFields(TypedDict, total=False):
    """The fields of `config.json` in addition to the config."""

    format: Annotated[int, msgspec.Meta(ge=1)]
    architecture: str
    labels: tuple[str, ...]
    problem_type: str
    train_examples: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    total_steps: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    used_tokenizer: _UsedTokenizer
    fingerprints: dict[str, str]


class TrialResult(TypedDict):
    """The content of `TRIAL_RESULT`.

    A trial has failed if training diverged, or if the score by `metric` is not better than `baseline`, the score of the
    best constant prediction.
    """

    scores: dict[str, float | None]
    failed: bool
    metric: NotRequired[str]
    baseline: NotRequired[float]


class DevSample(TypedDict):
    """An example of the dev set for the HTML report."""

    text: str
    label: str
    prediction: str


def read_info(workdir: epath.PathLike) -> RunInfo | None:
    """Reads `config.json` of a workdir; returns None if the file does not exist.

    Raises:
      UserError: the file is damaged or has a later format.
    """
    path = epath.Path(workdir) / CONFIG
    if not path.exists():
        return None
    content: dict[str, Any] = read_json(path)
    number = content.get("format") if isinstance(content, dict) else None
    if type(number) is int and number > FORMAT:
        raise UserError(
            f"{path}: format = {number}: must be at most {FORMAT} for this version of bertjax; install a newer version"
        )
    try:
        fields = msgspec.convert(content, _InfoFields)
        config = _parse_config({name: x for name, x in content.items() if name not in _InfoFields.__annotations__})
    except (ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        if isinstance(error, UserError) and "config.model.family" in str(error):
            raise UserError(f"{path}: {error}") from None  # the family is not registered in this process
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"{path}: damaged, or written by another version or program ({reason})") from None
    values: dict[str, Any] = {name: value for name, value in fields.items() if name not in ("format", "used_tokenizer")}
    used_tokenizer = fields.get("used_tokenizer")
    return RunInfo(config.lock(), tokenizer=dict(used_tokenizer) if used_tokenizer else None, **values)


def _parse_config(content: dict[str, Any]) -> ConfigDict:
    """Returns the config of a run from JSON values. Raises errors of several types if the content is invalid."""
    model = content["model"]
    config = (pretraining_config() if "stages" in content else common_config()).unlock()
    if "stages" in content:  # `update` would merge the stages with the default stages
        config.stages = ConfigDict(content.pop("stages"))
    if "encoder" in model:
        model["family"] = OLD_ENCODERS[model.pop("encoder")]
    if "family" in model:
        config.model = families.model_fields(model["family"])
    config.update(content)
    validate_model(config)
    one_of(config, "dtype", DTYPES)
    families.config_of(config)  # raises an error for unknown fields
    terms_of_run(config)
    return config


def require_info(workdir: epath.PathLike) -> RunInfo:
    """Reads `config.json` of a workdir. Raises `UserError` if the file does not exist; see also `read_info`."""
    info = read_info(workdir)
    if info is None:
        raise UserError(f"no {epath.Path(workdir) / CONFIG}: {str(workdir)!r} is not the workdir of a run")
    return info


def write_info(workdir: epath.PathLike, info: RunInfo, tokenizer: Tokenizer | None) -> None:
    """Writes `config.json` and the tokenizer. Inference needs these files and a checkpoint."""
    content: dict[str, Any] = {"format": FORMAT, **json.loads(info.config.to_json_best_effort())}
    if info.architecture:
        content |= {"architecture": info.architecture, "labels": list(info.labels or ())}
    for name in ("problem_type", "train_examples", "total_steps", "fingerprints"):
        if value := getattr(info, name):
            content[name] = value
    if tokenizer is not None:
        tokenizer.save(workdir)
        content["used_tokenizer"] = tokenizer_entry(tokenizer)
    write_whole(epath.Path(workdir) / CONFIG, json.dumps(content, indent=1) + "\n")


def tokenizer_entry(tokenizer: Tokenizer) -> dict:
    """Returns the value of `RunInfo.tokenizer`."""
    return {"kind": tokenizer.kind, "lowercase": tokenizer.lowercase, "fingerprint": tokenizer.fingerprint}


def tokenizer_of_run(workdir: epath.PathLike, info: RunInfo) -> Tokenizer | None:
    """Loads the tokenizer of a run.

    Returns:
      The tokenizer; None if the run was converted from a checkpoint without a tokenizer.

    Raises:
      UserError: the file differs from the tokenizer with which the model was trained.
    """
    if info.tokenizer is None:
        return None
    kind = info.tokenizer["kind"]
    path = epath.Path(workdir) / tokenizer.KINDS[kind].filename
    loaded = tokenizer.load_tokenizer(kind, path, info.tokenizer["lowercase"])
    if loaded.fingerprint != info.tokenizer["fingerprint"]:
        raise UserError(
            f"{path}: the fingerprint {loaded.fingerprint} must be {info.tokenizer['fingerprint']}, as in {CONFIG}; "
            f"copy the tokenizer of the training again"
        )
    return loaded


def differences(saved: RunInfo, current: RunInfo, identity: Sequence[str] = ()) -> list[Difference]:
    """Returns the differences of two infos in the fields of `RESULT_FIELDS`, the labels, the tokenizer and the data.

    Labels, tokenizers and data are compared only if both infos have them. A difference is fatal in the task, the fields
    of `identity`, the parent, the objectives, the teacher, the architecture of the model, LoRA (except the dropout
    rate), the name and the options of the optimizer, the frozen params, the labels, the tokenizer, or the data. It is
    also fatal if only one of the two runs has a moving average of the params.

    Args:
      saved: the info in the workdir.
      current: the info of the process that resumes the run.
      identity: fields that identify the task, in addition to `task`.
    """
    fatal_fields = {"task", "branch_from", "distill.teacher", "freeze_layers", "keep_layers", *identity}
    fatal_fields |= {"optimizer.name", "optimizer.options"}
    changes_frozen_params = _frozen_groups(saved.config) != _frozen_groups(current.config)
    changeable_fields = {
        f"model.{name}" for name in fields_with_roles(families.FAMILIES.get(saved.config.model.family).config_class, "")
    }

    def is_fatal(field: str, old: Any, new: Any) -> bool:
        return (
            field in fatal_fields
            or field.startswith("objectives.")
            or (field.startswith("optimizer.groups.") and changes_frozen_params)
            or (field.startswith("model.") and field not in changeable_fields)
            or (field.startswith("lora.") and field != "lora.dropout")
            or (field == "optimizer.average" and not (old and new))  # the moving average cannot start or end later
        )

    old, new = _flat_fields(saved.config), _flat_fields(current.config)
    changed = [
        Difference(field, old.get(field), new.get(field), is_fatal(field, old.get(field), new.get(field)))
        for field in dict.fromkeys((*new, *old))
        if old.get(field) != new.get(field)
    ]
    return changed + _differences_of_data(saved, current)


def _differences_of_data(saved: RunInfo, current: RunInfo) -> list[Difference]:
    """Returns the differences in training examples, labels, tokenizer and data, where both infos have them."""

    def values(info: RunInfo) -> dict[str, Any]:
        # The fingerprint of the tokenizer also depends on `lowercase`.
        fingerprint = info.tokenizer["fingerprint"] if info.tokenizer else None
        examples, fingerprints = info.train_examples or None, info.fingerprints or None
        return dict(train_examples=examples, labels=info.labels, tokenizer=fingerprint, fingerprints=fingerprints)

    changed, new_values = [], values(current)
    for field, old in values(saved).items():
        if old is not None and (new := new_values[field]) is not None and old != new:
            changed.append(Difference(field, old, new, is_fatal=field != "train_examples"))
    return changed


def _frozen_groups(config: ConfigDict) -> set[str]:
    """Returns the regular expressions of the param groups that are frozen by a learning rate factor of 0."""
    return {group.params for group in config.optimizer.groups.values() if group.learning_rate_factor == 0}


def raise_if_fatal(workdir: epath.PathLike, differences: Sequence[Difference]) -> None:
    """Raises `UserError` if a difference is fatal."""
    for difference in differences:
        if difference.is_fatal:
            raise UserError(_message_of(workdir, difference))


def changed_data(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Returns the names of files or records whose fingerprints have changed."""
    return [name for name in saved if name in current and saved[name] != current[name]]


def _message_of(workdir: epath.PathLike, difference: Difference) -> str:
    """Returns the error message of a fatal difference."""
    field, old, new, _ = difference
    if field == "tokenizer":
        return f"{workdir} holds a run with another tokenizer; choose another --workdir"
    if field == "labels":
        return (
            f"{workdir} holds a run with the labels {', '.join(old[:8])}, but the data has {', '.join(new[:8])}; "
            f"choose another --workdir"
        )
    if field == "fingerprints":
        removed, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
        parts = [
            f"{', '.join(names)} {change}"
            for names, change in ((changed_data(old, new), "changed"), (removed, "no longer read"), (added, "new"))
            if names
        ]
        return (
            f"{workdir} holds a run on other data ({'; '.join(parts)}); restore the data, or choose another --workdir"
        )
    return f"config.{field} = {new!r}: {workdir} holds a run with {old!r}; choose another --workdir"


def _flat_fields(config: ConfigDict) -> dict[str, Any]:
    """Returns {dotted name: JSON value} of the fields of `RESULT_FIELDS` and of `eval.patience`."""
    content = json.loads(config.to_json_best_effort())
    # Defaults for runs of older versions without these fields.
    leaves: dict[str, Any] = {
        "head.lstm_size": 0, "head.lstm_layers": 1, "head.class_weights": "", "head.label_smoothing": 0.0,
        "data.multi_label": "", "data.on_bad_answer": "stop", "data.windows": "", "data.heldout_seed": 0,
        "data.query_prompt": "",
        "keep_layers": 0, "data.join": "spaces", "data.dev.ignore_identical_ids": False,
        "distill.teacher": "", "distill.temperature": 2.0, "distill.weight": 0.5,
        "distill.student_temperature": 0.0, "distill.teacher_temperature": 0.0,
        "loss.name": "", "loss.distance_metric": "cosine", "loss.triplet_margin": 0.5,
        "data.sampling": "weights", "data.temperature": 1.0, "batch_by": "examples",
        "loss.guide": "", "loss.guide_margin": 0.0,
    }  # fmt: skip
    for section in RESULT_FIELDS:
        if section in content:
            leaves |= sorted(flatten_dict({section: content[section]}, sep=".").items())
    if not leaves.get("lora.rank"):  # without LoRA; runs of older versions lack these fields
        leaves = {name: value for name, value in leaves.items() if not name.startswith("lora.")}
    leaves["eval.patience"] = content.get("eval", {}).get("patience", 0)
    leaves.pop("model.attention", None)  # attention implementations differ only in rounding
    return leaves


def append_command(workdir: epath.PathLike) -> None:
    """Appends the date and the command of this process to `COMMANDS`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else ""
    # Both `bertjax train` and `python -m bertjax.main` run the module `bertjax.cli.train`.
    program = ["python", "-m", "bertjax.main" if name == "bertjax.cli.train" else name] if name else sys.argv[:1]
    path, date = epath.Path(workdir) / COMMANDS, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    command = shlex.join([*program, *sys.argv[1:]]).replace("\n", " ").encode(errors="backslashreplace")
    write_whole(path, (read_whole(path) if path.exists() else b"") + f"{date}\t".encode() + command + b"\n")


def read_commands(workdir: epath.PathLike) -> list[tuple[str, str]]:
    """Returns the dates and the commands that trained a run; an empty list for runs of older versions."""
    path = epath.Path(workdir) / COMMANDS
    lines = read_whole(path).decode(errors="replace").split("\n") if path.exists() else []
    return [(date, command) for date, _, command in (line.partition("\t") for line in lines) if command]


def sample_indices(count: int) -> list[int]:
    """Returns the indices of up to `MAX_SAMPLES` evenly spaced examples of `count` examples."""
    return sorted({number * count // MAX_SAMPLES for number in range(MAX_SAMPLES)}) if count else []


def samples_file(rows: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """Returns {SAMPLES: JSON of `DevSample`s}.

    Args:
      rows: (text, label, prediction) of each example; longer texts are truncated to `MAX_SAMPLE_LENGTH` characters.
    """
    named = [{name: cell[:MAX_SAMPLE_LENGTH] for name, cell in zip(DevSample.__annotations__, row)} for row in rows]
    return {SAMPLES: json.dumps(named, ensure_ascii=False, indent=1) + "\n"}


def read_samples(workdir: epath.PathLike) -> list[DevSample]:
    """Returns the samples of the dev set; an empty list if there is no file. Raises `UserError` for a damaged file."""
    path = epath.Path(workdir) / SAMPLES
    return read_json(path, list[DevSample]) if path.exists() else []


def read_report(workdir: epath.PathLike) -> str | None:
    """Returns the report of a run; None before the run has finished."""
    path = epath.Path(workdir) / REPORT
    return read_whole(path).decode(errors="replace").rstrip("\n") if path.exists() else None


def write_report_text(workdir: epath.PathLike, text: str) -> None:
    """Writes the report of a finished run."""
    write_whole(epath.Path(workdir) / REPORT, text + "\n")


def delete_report(workdir: epath.PathLike) -> None:
    """Deletes the report of a run that will be extended."""
    (epath.Path(workdir) / REPORT).unlink(missing_ok=True)

"""What a workdir says about itself: config.json, the tokenizer, and at the end report.txt; of a search, the best."""

import json
import secrets
from collections.abc import Sequence

import jax
import ml_collections
from etils import epath
from jax.experimental import multihost_utils

from bertjax.config import UserError, default_config
from bertjax.files import write_whole
from bertjax.text import tokenizer
from bertjax.training.logging import read_metrics

CONFIG, REPORT = "config.json", "report.txt"
RUNS = "runs"  # of a search over hyperparameters
BEST = "best"  # of a search over hyperparameters: which of its runs is the best, such as "runs/seed=1"


def check_shared(workdir: epath.PathLike) -> None:
    """Raises `UserError` where the hosts of a run do not see the same folder."""
    if jax.process_count() == 1:
        return
    mark = epath.Path(workdir) / f".shared-{multihost_utils.broadcast_one_to_all(secrets.randbits(30))}"
    if jax.process_index() == 0:
        write_whole(mark, "")
    multihost_utils.sync_global_devices("workdir marked")
    seen = multihost_utils.process_allgather(mark.exists())
    if jax.process_index() == 0:
        mark.unlink()
    if not seen.all():
        raise UserError(
            f"--workdir={workdir}: host {seen.argmin()} does not see what host 0 writes there; take a folder that all "
            f"hosts share, such as gs://BUCKET/RUN"
        )


def read_config(workdir: epath.PathLike) -> ml_collections.ConfigDict:
    """The config of a run. Raises `UserError` where the folder holds none."""
    path = epath.Path(workdir) / CONFIG
    if not path.exists():
        raise UserError(f"no {path}: {str(workdir)!r} is not the workdir of a run")
    config = default_config().unlock()
    try:
        config.update(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise UserError(f"{path}: damaged; it was written by another program, or edited") from None
    return config.lock()


def check_model(workdir: epath.PathLike, config) -> None:
    """Raises `UserError` where a workdir holds another model. See `check_tokenizer` for the other half."""
    if not (epath.Path(workdir) / CONFIG).exists():
        return
    before = read_config(workdir)
    for name, value in config.model.items():
        if before.model.get(name) != value:
            raise UserError(
                f"config.model.{name} = {value!r}: {workdir} holds a run with {before.model.get(name)!r}; take another "
                f"--workdir, or delete it"
            )


_HEAD = tuple(("head", name) for name in ("layers", "lstm_size", "lstm_layers"))


def check_task(workdir: epath.PathLike, config) -> None:
    """Raises `UserError` where a workdir holds a run of another task, or a search where this is a run, or a run where
    this is a search."""
    is_search, workdir = bool(config.get("sweep")), epath.Path(workdir)
    if (workdir / (CONFIG if is_search else RUNS)).exists():
        there, here = ("a single run", "a search") if is_search else ("a search", "a single run")
        raise UserError(f"{workdir}: holds {there}, and this is {here}; take another --workdir")
    if not (workdir / CONFIG).exists():
        return
    before = read_config(workdir)
    for section, name in (("", "task"), ("data", "name"), ("data", "version"), *_HEAD):
        old, new = ((values.get(section, {}) if section else values).get(name) for values in (before, config))
        if old != new:
            field = f"{section}.{name}" if section else name
            raise UserError(f"config.{field} = {new!r}: {workdir} holds a run of {old!r}; take another --workdir")


def check_labels(workdir: epath.PathLike, labels: Sequence[str]) -> None:
    """Raises `UserError` where a workdir holds a run on data with other labels."""
    if not (epath.Path(workdir) / CONFIG).exists():
        return
    before = tuple(read_config(workdir).get("labels", labels))
    if before != tuple(labels):
        raise UserError(
            f"{workdir} holds a run with the labels {', '.join(before[:8])}, but the data has {', '.join(labels[:8])}; "
            f"take another --workdir"
        )


def adopt(workdir: epath.PathLike, config) -> None:
    """Sets what `config.init_checkpoint` decided when the run was begun."""
    before = read_config(workdir)
    config.model.update(hidden_act=before.model.hidden_act, layer_norm_eps=before.model.layer_norm_eps)


def check_tokenizer(workdir: epath.PathLike, pieces: tokenizer.Tokenizer) -> None:
    """Raises `UserError` where a workdir holds a model that has learnt other pieces."""
    if not (epath.Path(workdir) / CONFIG).exists():
        return
    used = read_config(workdir).get("used_tokenizer", {})
    if used.get("fingerprint", pieces.fingerprint) != pieces.fingerprint:
        raise UserError(f"{workdir} holds a run with another vocabulary than this; take another --workdir")


def changes(workdir: epath.PathLike, config) -> list[str]:
    """What a config says otherwise than the one that a run was begun with, as far as it decides what is learnt."""
    if not (epath.Path(workdir) / CONFIG).exists():
        return []
    before = json.loads(read_config(workdir).to_json_best_effort())
    now = json.loads(config.to_json_best_effort())
    decisive = ("seed", "batch_size", "epochs", "max_seq_length", "stages", "data", "head", "optimizer")
    decisive += ("init_checkpoint",)
    decisive += ("model",) if config.task == "pretraining" else ()  # which fine-tuning takes from its checkpoint
    old, new = (
        dict(leaf for section in decisive if section in values for leaf in _leaves(section, values[section]))
        for values in (before, now)
    )
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):  # of fine-tuning too
        old[f"model.{name}"], new[f"model.{name}"] = before["model"].get(name), now["model"].get(name)
    return [f"{name} = {new[name]!r} (was {old[name]!r})" for name in new if name in old and old[name] != new[name]]


def _leaves(name: str, value) -> list[tuple[str, object]]:
    if not isinstance(value, dict):
        return [(name, value)]
    return [leaf for key in sorted(value) for leaf in _leaves(f"{name}.{key}", value[key])]


def null_threshold(workdir: epath.PathLike) -> float | None:
    """Of a run on SQuAD 2.0 the odds above which there is no answer, as tuned on its dev set; None: not known."""
    tuned = [line["eval/null_threshold"] for line in read_metrics(workdir) if "eval/null_threshold" in line]
    return tuned[-1] if tuned else read_config(workdir).get("null_threshold")


def write_config(
    workdir: epath.PathLike,
    config,
    pieces: tokenizer.Tokenizer | None,
    architecture: str = "",
    labels: Sequence[str] = (),
) -> None:
    """Writes config and tokenizer, so that the folder alone is enough to use what was learnt.

    `used_tokenizer` is what the records were made with, which decides where the config names no tokenizer.
    `architecture` and `labels`: of a fine-tuned output layer, the class of transformers and the names of its rows.
    """
    content = json.loads(config.to_json_best_effort())
    if architecture:
        content |= {"architecture": architecture, "labels": list(labels)}
    if pieces is not None:
        pieces.save(workdir)
        content["used_tokenizer"] = {
            "kind": pieces.kind,
            "lowercase": pieces.lowercase,
            "fingerprint": pieces.fingerprint,
        }
    write_whole(epath.Path(workdir) / CONFIG, json.dumps(content, indent=1) + "\n")


def load_tokenizer(workdir: epath.PathLike) -> tokenizer.Tokenizer | None:
    """The tokenizer of a run; None where it was converted from a checkpoint that brought none."""
    used = read_config(workdir).get("used_tokenizer")
    if used is None:
        return None
    filename = tokenizer.KINDS[used.kind].filename
    return tokenizer.load(used.kind, epath.Path(workdir) / filename, used.lowercase)


def read_report(workdir: epath.PathLike) -> str | None:
    path = epath.Path(workdir) / REPORT
    return path.read_text().rstrip("\n") if path.exists() else None


def write_report(workdir: epath.PathLike, text: str) -> None:
    write_whole(epath.Path(workdir) / REPORT, text + "\n")

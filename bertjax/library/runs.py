"""Training, and the preparation of data for training."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.distributed.topology import available_cores
from bertjax.launch.overrides import find_field, note_overrides
from bertjax.launch.tables import use_tables
from bertjax.launch.validate import validate
from bertjax.library.types import Path
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.hooks.hook import Hook
from bertjax.training.hooks.registry import check_hooks

Config: TypeAlias = str | os.PathLike[str] | ConfigDict  # the name of an experiment, a Python file, or a config


def train(
    config: Config,
    workdir: Path | None = None,
    overrides: Mapping[str, Any] = {},
    hooks: Sequence[Hook] = (),
    data: Any = None,
    *,
    began: float | None = None,
) -> epath.Path:
    """Pre-trains or fine-tunes a model, or runs a sweep. Resumes an earlier run in `workdir`.

    The function prints the same lines as `bertjax train`. Ctrl-C saves a checkpoint and raises `KeyboardInterrupt`.

    Args:
      config: the name of an experiment, such as "small:mini", the path of a Python file, or a config, which is not
        changed.
      workdir: the folder of the run; by default runs/NAME for an experiment or a file.
      overrides: {field: value}, such as {"stages.short.steps": 100}.
      hooks: objects that the training loop calls, see `bertjax.training.hooks.Hook`. A sweep calls them in each trial.
      data: the data in place of `data.path` or `data.corpus`: a pandas or polars DataFrame, a `datasets.Dataset`, or an
        iterable of dicts; or {"train": ..., "dev": ...}. The tables are written to WORKDIR/data as JSON lines. Without
        a dev table, a tenth of the rows is held out. Pre-training and the tasks `classify`, `tag` and `embed` support
        this argument.
      began: the time from which `config.budget` is measured, in seconds of `time.monotonic`; by default the time of the
        call.

    Returns:
      The workdir.

    Raises:
      UserError: for a mistake in the config, and for a workdir with another run.

    Examples:
      >>> workdir = bertjax.train("classify", "runs/reviews", {"data.path": "reviews.csv"})
      >>> model = bertjax.load(workdir)
    """
    check_hooks(hooks)
    run_config = _load_config(config, overrides)
    if workdir is None:
        if isinstance(config, ConfigDict):
            raise UserError("workdir: is missing; name the folder of the run, because a config has no name")
        workdir = f"runs/{experiments.name(os.fspath(config))}"
    if data is not None:
        use_tables(run_config, data, workdir)
    validate(run_config)

    from bertjax.launch.start import launch
    from bertjax.reporting.page import draw

    launch(run_config, workdir, began=began, draw=draw, hooks=hooks)
    return epath.Path(workdir)


def prepare(
    config: Config,
    output: Path,
    workers: int | None = None,
    overrides: Mapping[str, Any] = {},
    beam_options: list[str] | None = None,
) -> epath.Path:
    """Writes the records of every stage of a config, and their tokenizer, to a folder.

    A config whose `data.records` is the folder trains on the records. In a script, call the function under
    `if __name__ == "__main__"`, because the workers are processes that import the script.

    Args:
      config: the experiment or config, as for `train`.
      output: the folder; it must not contain finished records.
      workers: the number of processes; by default one per core.
      overrides: {field: value}, as for `train`.
      beam_options: options of Apache Beam, such as ["--runner=DataflowRunner"], to run on Beam.

    Returns:
      The folder.

    Raises:
      UserError: for a mistake in the config, and if the corpus has too few documents.
    """
    from bertjax.data.preprocessing import preparation

    resolved = _resolve_corpus_config(_load_config(config, overrides))
    preparation.prepare(resolved, output, available_cores() if workers is None else workers, beam_options)
    return epath.Path(output)


def learn_vocabulary(
    config: Config, output: Path, workers: int | None = None, overrides: Mapping[str, Any] = {}
) -> tuple[Tokenizer, str]:
    """Learns a vocabulary from the corpus of a config, and writes it to a folder.

    Args:
      config: the experiment or config, as for `train`.
      output: the folder.
      workers: the number of processes; by default one per core.
      overrides: {field: value}, as for `train`.

    Returns:
      The tokenizer, and the path of its file, which is a value of `tokenizer.path`.

    Raises:
      UserError: for a mistake in the config, and if the corpus has too little text.
    """
    from bertjax.data.preprocessing import vocabulary

    resolved = _resolve_corpus_config(_load_config(config, overrides))
    tokenizer = vocabulary.learn_vocabulary(resolved, available_cores() if workers is None else workers)
    tokenizer.save(output)
    return tokenizer, os.path.join(output, tokenizer.filename)


def _resolve_corpus_config(config: ConfigDict) -> ConfigDict:
    """Returns a config of pre-training with the sizes and the tokenizer that its budget and checkpoint determine."""
    from bertjax.launch.budget import plan
    from bertjax.pretraining.init_checkpoint import resolve_checkpoint
    from bertjax.pretraining.validate import validate_pretraining

    validate_pretraining(config)  # Rejects tasks other than pre-training.
    validate(config)
    resolved, _ = resolve_checkpoint(plan.with_sizes(config))
    return resolved


def _load_config(config: Config, overrides: Mapping[str, Any]) -> ConfigDict:
    """Returns a new config with overrides. Raises `UserError` for an unknown field or a value of another type."""
    if isinstance(config, ConfigDict):
        loaded = config.copy_and_resolve_references().lock()
    else:
        loaded = experiments.load(os.fspath(config))
    width = loaded.get("model", {}).get("hidden_size")
    for name, value in overrides.items():
        try:
            find_field(loaded, name).set(value)
        except UserError as error:
            raise UserError(f"{name} = {value!r}: {error}") from None
    note_overrides(loaded, overrides, width)
    return loaded

"""What a workdir says about itself: config.json, the tokenizer, and at the end report.txt."""

import json

import ml_collections
from etils import epath

from bertjax.config import UserError, default_config
from bertjax.files import write_whole
from bertjax.text import tokenizer

CONFIG, REPORT = "config.json", "report.txt"


def read_config(workdir: epath.PathLike) -> ml_collections.ConfigDict:
    """The config of a run. Raises `UserError` where the folder holds none."""
    path = epath.Path(workdir) / CONFIG
    if not path.exists():
        raise UserError(f"no {path}: {str(workdir)!r} is not the workdir of a run")
    config = default_config().unlock()
    config.update(json.loads(path.read_text()))
    return config.lock()


def check_model(workdir: epath.PathLike, config) -> None:
    """Raises `UserError` where a workdir holds another model, or one with another tokenizer."""
    if not (epath.Path(workdir) / CONFIG).exists():
        return
    before = read_config(workdir)
    for section in ("model", "tokenizer"):
        for name, value in config[section].items():
            if before[section].get(name) != value:
                raise UserError(
                    f"config.{section}.{name} = {value!r}: {workdir} holds a run with {before[section].get(name)!r}; "
                    f"take another --workdir, or delete it"
                )


def write_config(workdir: epath.PathLike, config, pieces: tokenizer.Tokenizer) -> None:
    """Writes config and tokenizer, so that the folder alone is enough to use what was learnt.

    `used_tokenizer` is what the records were made with, which decides where the config names no tokenizer.
    """
    pieces.save(workdir)
    content = json.loads(config.to_json_best_effort())
    content["used_tokenizer"] = {"kind": pieces.kind, "lowercase": pieces.lowercase}
    write_whole(epath.Path(workdir) / CONFIG, json.dumps(content, indent=1) + "\n")


def load_tokenizer(workdir: epath.PathLike) -> tokenizer.Tokenizer:
    used = read_config(workdir).used_tokenizer
    filename = tokenizer.KINDS[used.kind].filename
    return tokenizer.load(used.kind, epath.Path(workdir) / filename, used.lowercase)


def read_report(workdir: epath.PathLike) -> str | None:
    path = epath.Path(workdir) / REPORT
    return path.read_text().rstrip("\n") if path.exists() else None


def write_report(workdir: epath.PathLike, text: str) -> None:
    write_whole(epath.Path(workdir) / REPORT, text + "\n")

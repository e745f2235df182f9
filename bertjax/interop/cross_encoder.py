"""Folders of the CrossEncoder of sentence-transformers: a classifier that reads pairs of texts.

Before version 5.4, the settings are in the config.json of the classifier. Later versions also write `modules.json`.
"""

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import note, read_json, write_whole
from bertjax.config.model_config import BertConfig
from bertjax.interop import hf_tokenizer, huggingface
from bertjax.interop.sentence_transformers import (
    CONFIG,
    CROSS_ENCODER,
    ENCODER,
    IDENTITY,
    MODULES,
    PACKAGE,
    READ,
    SETTINGS,
    TASKS,
    Folder,
    limited_length,
    max_seq_length_of,
    model_max_length_of,
    read_settings_file,
)
from bertjax.models.library_fields.tables import check_fields

ARCHITECTURE = "BertForSequenceClassification"  # the architecture of a CrossEncoder
RERANK = "rerank"  # the task of runs that train a CrossEncoder
SIGMOID = "torch.nn.modules.activation.Sigmoid"
QUERY = "query"  # the name of the prompt of a run


class _ClassifierConfig(TypedDict, total=False):
    """The fields of `CONFIG` with the activation of a CrossEncoder: since version 4, and before."""

    sentence_transformers: dict[str, Any] | None
    sbert_ce_default_activation_function: str | None


def read_settings(folder: epath.Path, config: BertConfig, architecture: str, modules: Folder | None) -> ConfigDict:
    """Returns the settings of a CrossEncoder in the form of the config of a run; empty for another classifier.

    The settings are `max_seq_length`, `data.query_prompt`, and two fields that a run does not have. `activation_fn` is
    the class of PyTorch that CrossEncoder applies to the logits; "" for the default of CrossEncoder, which depends on
    the number of logits. The section `PACKAGE` contains all prompts and the name of the default prompt.

    Args:
      folder: the folder of the classifier.
      config: the config of the encoder.
      architecture: the class of BERT with the same head.
      modules: the folder of sentence-transformers; None without `modules.json`.

    Raises:
      UserError: the model is not a classifier, or a value is not supported.
    """
    path = source = folder / CONFIG
    fields: _ClassifierConfig = read_json(path, _ClassifierConfig)
    section, old = fields.get("sentence_transformers"), fields.get("sbert_ce_default_activation_function")
    is_classifier = architecture == ARCHITECTURE
    if modules is None and (not is_classifier or (section is None and old is None)):
        return ConfigDict()
    if not is_classifier:
        stated = ", ".join(map(str, read_json(path).get("architectures") or ["none"]))
        raise UserError(f"{path}: architectures {stated} is not a classifier; a {CROSS_ENCODER} needs a classifier")
    activation = (section or {}).get("activation_fn") or old or ""
    prompts = dict[str, Any]()
    if modules is None:
        file = folder / hf_tokenizer.SETTINGS
        length = limited_length(file, "model_max_length", model_max_length_of(folder), config)
    else:
        source, settings = modules.path / SETTINGS, read_settings_file(modules.path)
        remedy = f"for the classifier without it, copy the folder without {MODULES}"
        check_fields(source, settings, PACKAGE, CROSS_ENCODER, READ[CROSS_ENCODER], remedy)
        prompts = _read_prompts(source, settings)
        activation = settings.get("activation_fn") or activation
        length = max_seq_length_of(modules, config)
    return ConfigDict({"activation_fn": _activation(source, activation), "max_seq_length": length, **prompts})


def _activation(path: epath.Path, stated: Any) -> str:
    """Returns the full name of an activation, "" for none. Raises `UserError` if the activation is not supported."""
    supported = {name.rpartition(".")[2]: name for name in (IDENTITY, SIGMOID)}
    name = str(stated).rpartition(".")[2]
    if stated and not (str(stated).startswith("torch.") and name in supported):
        raise UserError(
            f"{path}: activation_fn {stated!r} is not supported; supported: {IDENTITY}, {SIGMOID}; write one of these "
            f"to a copy of the folder"
        )
    return supported.get(name, "")


def _read_prompts(path: epath.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of prompts; {} without prompts. Prints the names of prompts that are not the default prompt.

    A CrossEncoder writes its default prompt before the first text of each pair, and other prompts only by name.
    """
    prompts = {name: text or "" for name, text in (fields.get("prompts") or {}).items()}
    default = fields.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise UserError(
            f"{path}: default_prompt_name is {default!r}, expected null or one of {', '.join(prompts) or 'no prompts'}"
        )
    if others := sorted(name for name, text in prompts.items() if text and name != default):
        note(path, f"ignored prompts, which a {CROSS_ENCODER} applies only by name: {', '.join(others)}")
    if not prompts:
        return {}
    section = {"prompts": list(map(list, prompts.items())), "default_prompt_name": default}
    return {"data": {"query_prompt": prompts.get(default, "")}, PACKAGE: section}


def activation_of(settings: ConfigDict, problem_type: str) -> str:
    """Returns the activation of a classifier for CrossEncoder, "" for its default.

    Args:
      settings: the settings of a run, or the result of `read_settings`.
      problem_type: the problem_type of the classifier.
    """
    is_number = bool(settings.get("task")) and problem_type == huggingface.REGRESSION
    return settings.get("activation_fn", IDENTITY if is_number else "")


def query_prompt_of(settings: ConfigDict) -> str:
    """Returns the text that precedes the first text of each pair, "" for none.

    Args:
      settings: the config of a run, or the result of `read_settings`.
    """
    return settings.get("data", {}).get("query_prompt", "")


def write(folder: epath.Path, settings: ConfigDict, activation: str, max_seq_length: int) -> None:
    """Adds the files of `CrossEncoder(folder)` to a Hugging Face folder of a classifier.

    Versions before 5.4 of the library read config.json only, which contains the activation, but no prompts.

    Args:
      folder: the folder.
      settings: the config of a run, or the result of `read_settings`, with the prompts.
      activation: the class of PyTorch that is applied to the logits; "" for the default of CrossEncoder.
      max_seq_length: the largest number of tokens of a pair.
    """
    transformer = {"idx": 0, "name": "0", "path": "", "type": f"{PACKAGE}.base.modules.transformer.Transformer"}
    outputs = {"method": "forward", "method_output_name": "logits"}
    section, prompt = settings.get(PACKAGE), query_prompt_of(settings)
    prompts, default = {QUERY: prompt} if prompt else {}, QUERY if prompt else ""
    if section:
        prompts, default = dict(section.prompts), section.default_prompt_name
    files = {
        MODULES: [transformer],
        ENCODER.format("bert"): {
            "transformer_task": TASKS[CROSS_ENCODER],
            "modality_config": {"text": outputs},
            "module_output_name": "scores",
            "max_seq_length": max_seq_length,
        },
        SETTINGS: {
            "model_type": CROSS_ENCODER,
            "prompts": prompts,
            "default_prompt_name": default or None,
            **({"activation_fn": activation} if activation else {}),
        },
    }
    for name, content in files.items():
        write_whole(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

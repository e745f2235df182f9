"""TF1 checkpoints of Google: `bert_model.ckpt.index` and `.data-*`, with `bert_config.json` and `vocab.txt`."""

import dataclasses
import json
from typing import Any

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.config.model_config import BertConfig
from bertjax.models import families
from bertjax.models.bert import family, huggingface
from bertjax.models.bert.huggingface import BERTJAX_FIELDS, FIELDS
from bertjax.models.bert.tf1_names import PARTS, to_params, to_variables, variable_names
from bertjax.text.tokenizer import Tokenizer

CONFIG, PREFIX = "bert_config.json", "bert_model.ckpt"
# Suffixes of the moments of Adam and LAMB, which are not part of the model.
OPTIMIZER = ("/adam_m", "/adam_v", "/lamb_m", "/lamb_v")


def check_exportable(config: BertConfig) -> None:
    """Raises `UserError` if the code of Google has no class for a model."""
    if families.family_of(config) is not family.FAMILY:
        raise UserError(f"model.family = {config.family!r}")
    huggingface.FORMAT.check_exportable(config)


def read_config(path: epath.Path) -> BertConfig:
    """Reads bert_config.json. The "gelu" of Google is the tanh form, which Hugging Face calls gelu_new."""
    fields: dict[str, Any] = read_json(path)
    known = {"gelu": fields.get("gelu_form", "gelu_new"), "gelu_new": "gelu_new", "relu": "relu"}
    activation = known.get(str(fields.get("hidden_act", "gelu")))
    if activation is None:
        raise UserError(f"{path}: hidden_act {fields['hidden_act']!r} is not supported; supported: gelu, relu")
    fields = {"layer_norm_eps": 1e-12, **fields, "hidden_act": activation}
    return FIELDS.build(path, fields)


def read_params(prefix: epath.Path, config: BertConfig) -> tuple[dict, list[str]]:
    """Returns the params of a checkpoint, and the names of variables that are not part of BERT.

    Raises `UserError` if the checkpoint is damaged, or was written by TensorFlow 2.
    """
    from bertjax.data.tensorflow import tf

    try:
        reader = tf.train.load_checkpoint(str(prefix))
        names = reader.get_variable_to_shape_map()
        known = variable_names(config)
        variables = {name: np.asarray(reader.get_tensor(name), np.float32) for name in known if name in names}
    except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
        raise UserError(f"{prefix}: damaged or incomplete ({str(error).splitlines()[0]}); copy it again") from None
    if any(".ATTRIBUTES/" in name for name in names):
        raise UserError(
            f"{prefix}: a checkpoint of TensorFlow 2 is not supported; supported: a checkpoint of TensorFlow 1 with "
            f"Google's names, such as bert_model.ckpt"
        )
    ignored = [n for n in sorted(names) if n not in known and not n.endswith(OPTIMIZER) and n != "global_step"]
    return to_params(variables, config, str(prefix)), ignored


def write(folder: epath.PathLike, config: BertConfig, params: dict, tokenizer: Tokenizer | None) -> list[str]:
    """Writes `bert_model.ckpt`, `bert_config.json` and the vocabulary.

    Returns the parts of the params that do not have a name in the code of Google.
    """
    from bertjax.data.tensorflow import tf

    folder = epath.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    variables = to_variables(params, config)
    tf.raw_ops.SaveV2(
        prefix=str(folder / PREFIX),
        tensor_names=list(variables),
        shape_and_slices=[""] * len(variables),
        tensors=list(variables.values()),
    )
    omitted = (*BERTJAX_FIELDS, "layer_norm_eps")
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in omitted}
    if config.hidden_act != "relu":
        fields["hidden_act"] = "gelu"
    if config.hidden_act == "gelu":
        fields["gelu_form"] = "gelu"  # for bertjax; the code of Google uses the tanh form
    if config.layer_norm_eps != 1e-12:
        fields["layer_norm_eps"] = config.layer_norm_eps
    write_whole(folder / CONFIG, json.dumps(fields, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder)
    return sorted(params.keys() - PARTS)

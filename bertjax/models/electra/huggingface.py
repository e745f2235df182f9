"""ELECTRA in Hugging Face's folders: names of tensors are BERT's, but for those of its output layers."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from etils import epath

from bertjax.models import json_config, tensors
from bertjax.models.bert import huggingface as bert
from bertjax.models.electra.config import ElectraConfig

CLASSES = {"Electra": "ELECTRA"}  # how the names of its classes begin, and how people write it
INPUTS = bert.INPUTS
SPECIAL_IDS = bert.SPECIAL_IDS
REQUIRED = (*bert.REQUIRED, "embedding_size")
ONLY = bert.ONLY | {"hidden_act": "gelu"}
# What a classifier of choices is pooled with. No other class reads these fields.
SUMMARY = {
    "summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu", "summary_proj_to_labels": False,
}  # fmt: skip
DISCRIMINATOR = "ElectraForPreTraining"
LAYOUT = bert.FolderLayout(
    lambda config: "Electra",
    bert.KINDS_WITHOUT_PAIRS | {"Model": (), "ForPreTraining": ()},
    names={
        "cls.predictions.transform.": "generator_predictions.",
        "cls.predictions.decoder.weight": "generator_lm_head.weight",
        "cls.predictions.bias": "generator_lm_head.bias",
        "bert.": "electra.",
    },
    # The dense layer of a classifier of texts, or of choices, is our pooler.
    names_in={
        "ForSequenceClassification": {"classifier.": "classifier.out_proj.", "bert.pooler.dense.": "classifier.dense."},
        "ForMultipleChoice": {"bert.pooler.dense.": "sequence_summary.summary."},
    },
)
ARCHITECTURES = tuple(f"Electra{kind}" for kind in LAYOUT.kinds)
# What tells replaced words, which is no part of BERT: our name and the tensors'.
REPLACED_TOKENS = "replaced_tokens"
LAYERS = {"dense": "discriminator_predictions.dense", "output": "discriminator_predictions.dense_prediction"}
classifier_rows, check_form = LAYOUT.classifier_rows, bert.check_form


def read_config(path: epath.Path, fields: Mapping) -> ElectraConfig:
    """Returns the config of a config.json with these fields. Raises `UserError` for a variant that we do not have."""
    chooses = "ForMultipleChoice" in str(fields.get("architectures"))
    names, only = json_config.field_names(ElectraConfig, bert.OWN_FIELDS), ONLY | (SUMMARY if chooses else {})
    found = json_config.read_fields(path, fields, "electra", names, only, required=REQUIRED, also=SUMMARY)
    return json_config.build(path, ElectraConfig, found, REQUIRED, bert.OWN_FIELDS)


def read_params(
    given: Iterable[tuple[str, np.ndarray]], fields: Mapping, config: ElectraConfig, source: str
) -> tuple[dict, list[str], str]:
    """As `bert.huggingface.FolderLayout.read_params`, with the layers of a discriminator."""
    names = [f"{theirs}.{part}" for theirs in LAYERS.values() for part in ("weight", "bias")]
    head: dict[str, np.ndarray] = {}

    def others() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in given:
            plain = tensors.WRAPPERS.sub("", name)
            if plain in names:
                head[plain] = tensor
            else:
                yield name, tensor

    params, ignored, wordless = LAYOUT.read_params(others(), fields, config, source)
    if not head:
        return params, ignored, wordless
    found, hidden = {}, config.hidden_size
    for (ours, theirs), size in zip(LAYERS.items(), (hidden, 1)):
        kernel = tensors.take(head, f"{theirs}.weight", (size, hidden), source, "an ELECTRA").T
        found[ours] = {"kernel": kernel, "bias": tensors.take(head, f"{theirs}.bias", (size,), source, "an ELECTRA")}
    return params | {REPLACED_TOKENS: found}, ignored, wordless


def choose_architecture(params: dict, config: ElectraConfig, stated: str = "") -> str:
    """As `bert.huggingface.FolderLayout.choose_architecture`; a discriminator is one, unless it has been fine-tuned."""
    chosen = LAYOUT.choose_architecture(params, config, stated)
    is_fine_tuned = set(LAYOUT.kinds[bert.kind_of(chosen)]) & set(bert.FINE_TUNED_HEADS)
    return DISCRIMINATOR if REPLACED_TOKENS in params and not is_fine_tuned else chosen


def to_tensors(params: dict, config: ElectraConfig, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """As `bert.huggingface.FolderLayout.to_tensors`."""
    found, left_out = LAYOUT.to_tensors(params, config, architecture)
    if architecture != DISCRIMINATOR:
        return found, left_out
    present = ["discriminator_predictions"] if REPLACED_TOKENS in params else []
    tensors.check_parts(architecture, ["discriminator_predictions"], present, choose_architecture(params, config))
    for ours, theirs in LAYERS.items():
        layer = params[REPLACED_TOKENS][ours]
        found[f"{theirs}.weight"] = np.ascontiguousarray(np.asarray(layer["kernel"]).T)
        found[f"{theirs}.bias"] = np.asarray(layer["bias"])
    return found, [name for name in left_out if name != REPLACED_TOKENS]


def to_fields(config: ElectraConfig) -> dict:
    """Returns what config.json says of the encoder."""
    fields = {name: x for name, x in vars(config).items() if name not in bert.OWN_FIELDS}
    return {"model_type": "electra", **fields, "hidden_act": config.hidden_act}

"""ModernBERT in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, tensors
from bertjax.models.modernbert.config import ModernBertConfig

PREFIX = "ModernBert"  # how the names of its classes begin
CLASSES = {PREFIX: "ModernBERT"}  # and how people write it
# Fields that config.json has under another name.
NAMES = {
    "hidden_act": "hidden_activation",
    "layer_norm_eps": "norm_eps",
    "bias": "norm_bias",
    "attention_output_dropout_prob": "attention_dropout",  # theirs drops probabilities with it as well
}
OWN_FIELDS = ("glu", "family")
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
ONLY = {"embedding_dropout": 0.0, "mlp_dropout": 0.0, "decoder_bias": True}
# Other fields that `read_config` reads. The last four belong to transformers' training and change no prediction.
READ = (
    "classifier_activation", "head_dim", "layer_types", "rope_parameters", "rope_scaling", "sliding_window",
    "deterministic_flash_attn", "initializer_cutoff_factor", "sparse_pred_ignore_index", "sparse_prediction",
)  # fmt: skip
# Our parts, besides the encoder, of each class.
ARCHITECTURES = {
    "ModernBertModel": (),
    "ModernBertForMaskedLM": ("masked_lm",),
    "ModernBertForSequenceClassification": ("pooler", "classifier"),
    "ModernBertForMultipleChoice": ("pooler", "classifier"),
    "ModernBertForTokenClassification": ("pooler", "classifier"),
    "ModernBertForQuestionAnswering": ("pooler", "spans"),
}
INPUTS = ("input_ids", "attention_mask")
# Fields of config.json that are ids of special pieces.
SPECIAL_IDS = {"pad_token_id": "pad", "bos_token_id": "cls", "cls_token_id": "cls"}
SPECIAL_IDS |= {"eos_token_id": "sep", "sep_token_id": "sep"}


def read_config(path: epath.Path, fields: Mapping) -> ModernBertConfig:
    """Returns the config of a config.json, also of the form that older versions of transformers wrote.

    Raises `UserError` for a variant that we do not have.
    """
    bias, names = fields.get("norm_bias", False), json_config.field_names(ModernBertConfig, OWN_FIELDS, NAMES)
    only = ONLY | dict.fromkeys(BIASES, bias)
    found = json_config.read_fields(path, fields, "modernbert", names, only, required=REQUIRED, also=READ)
    activation = json_config.activation(path, fields, "hidden_activation")
    if fields.get("classifier_activation", "gelu") != fields.get("hidden_activation", "gelu"):
        stated = fields.get("classifier_activation", "gelu")
        raise UserError(f"{path}: classifier_activation {stated!r} is not hidden_activation")
    if fields.get("head_dim") not in (None, size := json_config.head_size(fields)):
        raise UserError(f"{path}: head_dim {fields['head_dim']!r} is not supported; supported: {size!r}")
    found |= {"hidden_act": activation} | _thetas(path, fields) | _pattern(path, fields)
    if "sliding_window" in fields:  # transformers then has a window of this size to either side
        if type(fields["sliding_window"]) is not int:
            raise UserError(f"{path}: sliding_window is {fields['sliding_window']!r}, which is not a valid int")
        found["local_attention"] = 2 * fields["sliding_window"]
    return json_config.build(path, ModernBertConfig, found, REQUIRED, OWN_FIELDS, NAMES)


def _thetas(path: epath.Path, fields: Mapping) -> dict:
    """Returns the bases of the rotary angles: of rope_scaling, else of rope_parameters by type of layer, else
    global_rope_theta and local_rope_theta."""
    kinds = {"global_rope_theta": "full_attention", "local_rope_theta": "sliding_attention"}
    by_kind = fields.get("rope_parameters") or {}
    if not isinstance(by_kind, dict) or by_kind.keys() - set(kinds.values()):
        raise UserError(f"{path}: rope_parameters {by_kind!r} must have an object for each type of layer")
    of_all, found = json_config.rope_theta(path, "rope_scaling", fields.get("rope_scaling")), {}
    for ours, kind in kinds.items():
        of_kind = json_config.rope_theta(path, f"rope_parameters.{kind}", by_kind.get(kind))
        theta = of_kind if of_all is None else of_all
        found[ours] = fields.get(ours, getattr(ModernBertConfig, ours)) if theta is None else theta
    return found


def _pattern(path: epath.Path, fields: Mapping) -> dict:
    """Which layers are global: every so many, or layer_types. Raises `UserError` if these are none of the former."""
    types, layers = fields.get("layer_types"), fields.get("num_hidden_layers")
    if types is None or not isinstance(layers, int):
        return {}
    if not isinstance(types, list) or set(map(str, types)) - {"full_attention", "sliding_attention"}:
        raise UserError(f"{path}: layer_types {types!r} must be a list of full_attention and sliding_attention")
    if len(types) != layers:
        raise UserError(f"{path}: layer_types has {len(types)} types, but there are {layers} layers")
    are_global = [kind == "full_attention" for kind in types]
    every = next((number for number in range(1, layers) if are_global[number]), layers)
    if are_global != [number % every == 0 for number in range(layers)]:
        raise UserError(f"{path}: layer_types must be full_attention in every n-th layer from the first one on")
    return {"global_attn_every_n_layers": every}


def read_params(
    given: Iterable[tuple[str, np.ndarray]], fields: Mapping, config: ModernBertConfig, source: str
) -> tuple[dict, list[str], str]:
    """Returns our params from named tensors, the names of ignored tensors, and why they predict no words.

    Raises `UserError` if tensors are missing, of another shape, or contradict each other.
    """
    named = {tensors.WRAPPERS.sub("", name): tensor for name, tensor in given}
    if "model.embeddings.tok_embeddings.weight" not in named:  # the encoder alone
        named = {f"model.{name}": tensor for name, tensor in named.items()}
    parts = [part for part in ("masked_lm", "classifier", "spans") if _has(part, named, fields)]
    rows = {part: named["classifier.weight"].shape[0] for part in parts if part != "masked_lm"}
    table, padding = _table(config, parts, rows), config.padded_vocab_size - config.vocab_size
    params = _stacked(tensors.to_params(table, named, padding, source, "a ModernBERT"), config)
    ignored = sorted(named.keys() - table.names() - {"decoder.weight"})
    words = named["model.embeddings.tok_embeddings.weight"]
    has_decoder = "masked_lm" in parts or "decoder.weight" in named
    wordless = tensors.untied(named, "decoder.weight", words, fields, source) if has_decoder else ""
    if wordless:
        params.pop("masked_lm", None)
        ignored += named.keys() & {"decoder.weight"}
    return params, ignored, wordless


def _has(part: str, named: Mapping, fields: Mapping) -> bool:
    answers = any("QuestionAnswering" in name for name in fields.get("architectures") or ())
    has = {"masked_lm": "decoder.bias", "classifier": "classifier.weight", "spans": "classifier.weight"}
    return has[part] in named and (part == "masked_lm" or (part == "spans") == answers)


def _table(config: ModernBertConfig, parts: Iterable[str], rows: Mapping[str, int]) -> tensors.TensorTable:
    """Returns which tensor each param is.

    Args:
      parts: what there is besides the encoder.
      rows: classes of each classifier among these.
    """
    hidden, heads = config.hidden_size, (config.num_attention_heads, config.head_size)
    size, inner, bias, found = (hidden,), (config.intermediate_size,), config.bias, tensors.TensorTable()
    words = "model.embeddings.tok_embeddings.weight"
    found.rows(("bert", "embeddings", "word", "embedding"), words, config.vocab_size, hidden)
    found.norm(("bert", "embeddings", "norm"), "model.embeddings.norm", hidden, bias)
    for number in range(config.num_hidden_layers):
        ours, theirs = ("bert", "layers", number), f"model.layers.{number}"
        if number:
            found.norm((*ours, "attention_norm"), f"{theirs}.attn_norm", hidden, bias)
        found.dense((*ours, "attention", "query_key_value"), f"{theirs}.attn.Wqkv", size, (3, *heads), bias)
        found.dense((*ours, "attention", "output"), f"{theirs}.attn.Wo", heads, size, bias)
        found.norm((*ours, "output_norm"), f"{theirs}.mlp_norm", hidden, bias)
        found.dense((*ours, "input"), f"{theirs}.mlp.Wi", size, (2, *inner), bias)
        found.dense((*ours, "output"), f"{theirs}.mlp.Wo", inner, size, bias)
    found.norm(("bert", "encoder", "norm"), "model.final_norm", hidden, bias)
    for part in parts:
        head = ("masked_lm",) if part == "masked_lm" else ("bert", "pooler")
        found.dense((*head, "dense"), "head.dense", size, size, bias)
        found.norm((*head, "norm"), "head.norm", hidden, bias)
        if part == "masked_lm":
            found.rows(("masked_lm", "bias"), "decoder.bias", config.vocab_size)
        else:
            found.dense((part, "dense"), "classifier", size, (rows[part],), bias=True)
    return found


def _stacked(params: dict, config: ModernBertConfig) -> dict:
    """Puts the layers where the encoder has them: the first, groups, and the rest."""
    import jax

    layers, period = list(params["bert"].pop("layers").values()), config.global_attn_every_n_layers
    count = (len(layers) - 1) // period
    encoder = params["bert"]["encoder"] | {"first": layers[0]}
    if count:
        encoder["groups"] = {
            f"layer_{place}": jax.tree.map(lambda *x: np.stack(x), *layers[1 + place : 1 + count * period : period])
            for place in range(period)
        }
    if rest := layers[1 + count * period :]:
        encoder["rest"] = {f"layer_{place}": layer for place, layer in enumerate(rest)}
    return params | {"bert": params["bert"] | {"encoder": encoder}}


def choose_architecture(params: dict, config: ModernBertConfig, stated: str = "") -> str:
    """Chooses the class for these params: that of a fine-tuned head, or the one that keeps the most.

    `stated`: the class of BERT, or of ModernBERT, that the checkpoint states; it decides between those with the same
    head.
    """
    return tensors.choose_class(ARCHITECTURES, PREFIX, tensors.parts_of(params), stated)


def to_tensors(params: dict, config: ModernBertConfig, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the tensors of a class of transformers, and the names of parts that it does not have.

    Raises `UserError` if the class has parts that the params lack.
    """
    from bertjax.models.modernbert.model import layers_of

    present, wanted = tensors.parts_of(params), ARCHITECTURES[architecture]
    tensors.check_parts(architecture, wanted, present, choose_architecture(params, config))
    layers = layers_of(params["bert"]["encoder"], config)
    tree = params | {"bert": params["bert"] | {"layers": dict(enumerate(layers))}}
    parts = [part for part in wanted if part != "pooler"]
    rows = {part: params[part]["dense"]["bias"].shape[0] for part in parts if part != "masked_lm"}
    found = tensors.to_named(_table(config, parts, rows), tree)
    if architecture == "ModernBertModel":
        found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    return found, sorted(present - set(wanted))


def classifier_rows(params: dict, architecture: str) -> int:
    """As `bert.huggingface.classifier_rows`."""
    return tensors.classifier_rows(params, architecture, ARCHITECTURES[architecture])


def to_fields(config: ModernBertConfig) -> dict:
    """Returns what config.json says of the encoder, in the old and in the new form of transformers."""
    names = (name for name in dataclasses.asdict(config) if name not in OWN_FIELDS)
    fields = {NAMES.get(name, name): getattr(config, name) for name in names}
    kinds = {True: "full_attention", False: "sliding_attention"}
    thetas = {"full_attention": config.global_rope_theta, "sliding_attention": config.local_rope_theta}
    return {
        "model_type": "modernbert",
        **fields,
        **dict.fromkeys(BIASES, config.bias),
        **ONLY,
        "classifier_activation": config.hidden_act,
        "layer_types": [kinds[config.is_global(number)] for number in range(config.num_hidden_layers)],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
    }


def check_form(config: ModernBertConfig) -> None:
    """Raises `UserError` if no class of transformers has this form of ModernBERT."""
    if not config.glu:
        raise UserError("model.glu = False")

"""The limits of single fields, and functions that check a field. A message names the field, the value and the fix."""

import operator
from collections.abc import Sequence
from typing import Any

from bertjax.common.errors import UserError
from bertjax.config.defaults import RECIPES

AT_LEAST_ONE: dict[str, Any] = dict(least=1)
AT_LEAST_ZERO: dict[str, Any] = dict(least=0)
BELOW_ONE: dict[str, Any] = dict(least=0, below=1)
SHARE: dict[str, Any] = dict(above=0, most=1)
REMAT_POLICIES = ("none", "dots", "full")  # the least recomputation first
DTYPES = ("auto", "float32", "bfloat16")
POOLS = ("mean", "cls", "last")  # pooling of the hidden states of a text
FLOAT32, INT8, UBINARY = PRECISIONS = ("float32", "int8", "ubinary")  # of written embeddings
FORMATS = ("bertjax", "huggingface", "sentence-transformers", "tf1", "peft", "stablehlo", "onnx")  # of checkpoints
SEED: dict[str, Any] = dict(least=0, below=2**31)


def _choices(**fields: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {name: dict(choices=choices) for name, choices in fields.items()}


def _of_section(section: str, limit: dict[str, Any], names: str) -> dict[str, dict[str, Any]]:
    """Returns the same limit for some fields of a section of the config."""
    return {f"{section}{name}": limit for name in names.split()}


LIMITS: dict[str, dict[str, Any]] = {
    **_choices(unroll=("auto", "yes", "no"), kernels=("auto", "no"), dtype=DTYPES, grad_dtype=DTYPES[1:]),
    "seed": SEED,
    **_of_section("", AT_LEAST_ONE, "batch_size microbatches log_every_steps hosts_timeout"),
    **_of_section("checkpoint.", AT_LEAST_ONE, "every_steps keep"),
    **_of_section("", AT_LEAST_ZERO, "checkpoint.keep_every eval.patience freeze_layers optimizer.skip_nonfinite"),
    **_of_section("optimizer.", BELOW_ONE, "beta1 beta2 weight_decay decay_to average"),
    **_of_section("optimizer.", SHARE, "decay_proportion layer_decay"),
    **_of_section("optimizer.", dict(above=0), "learning_rate max_grad_norm"),
    "optimizer.epsilon": dict(above=0, below=1),
    "optimizer.decay": dict(choices=("linear", "sqrt", "cosine")),
}
PRETRAINING_LIMITS: dict[str, dict[str, Any]] = LIMITS | {
    **_choices(recipe=("", *RECIPES), remat=(*REMAT_POLICIES, "auto")),
    **_of_section("optimizer.", AT_LEAST_ZERO, "warmup_steps warmup_tokens"),
    **_of_section("eval.", AT_LEAST_ONE, "every_steps max_sequences"),
    **_of_section("eval.", AT_LEAST_ZERO, "bits_windows memory_length clamp_length"),
    **_of_section("", AT_LEAST_ZERO, "z_loss tokenizer.extend adapt.positions adapt.new_pieces_first"),
    "adapt.positions_from": dict(choices=("repeat", "interpolate")),
    "data.seed": SEED,
    "data.dupe_factor": AT_LEAST_ONE,
    **_of_section("data.", BELOW_ONE, "short_seq_prob heldout_fraction"),
    "data.masked_lm_prob": dict(above=0, most=0.5),
    "data.next_sentence": dict(choices=("pairs", "none", "order")),
    "data.masking": dict(choices=("static", "dynamic")),
    "data.mix_when": dict(choices=("prepared", "read")),
    "data.layout": dict(choices=("google", "compact")),
    **_of_section("data.", dict(choices=("stop", "skip")), "on_corrupt on_bad_document"),
    "data.document": dict(choices=("blank_line", "file", "line")),
    **_of_section("data.cleaning.", AT_LEAST_ZERO, "min_words max_line_documents"),
    "data.cleaning.max_symbols": SHARE,
}
FINE_TUNING_LIMITS: dict[str, dict[str, Any]] = LIMITS | {
    "remat": dict(choices=REMAT_POLICIES),
    **_of_section("", BELOW_ONE, "optimizer.warmup_proportion lora.dropout"),
    **_of_section("", dict(above=0), "epochs lora.alpha distill.temperature"),
    **_of_section("", AT_LEAST_ZERO, "keep_layers lora.rank restarts eval.every_steps"),
    "max_seq_length": dict(least=8),
    "distill.weight": SHARE,
}


def require(ok: bool, field: str, value: Any, remedy: str) -> None:
    """Raises `UserError` unless `ok`."""
    if not ok:
        raise UserError(f"config.{field} = {value!r}: {remedy}")


def one_of(config: Any, field: str, choices: Sequence[str]) -> None:
    """Raises `UserError` unless the value of a field is one of `choices`."""
    within(field, value_of(config, field), choices=choices)


def at_least_one(config: Any, *fields: str) -> None:
    """Raises `UserError` unless all fields are 1 or more."""
    for field in fields:
        within(field, value_of(config, field), least=1)


def value_of(config: Any, field: str) -> Any:
    """Returns the value of a field such as "optimizer.learning_rate"."""
    for name in field.split("."):
        config = config[name]
    return config


def within(
    field: str,
    value: Any,
    role: str = "",
    choices: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raises `UserError` if `value` of `config.field` is outside the limits. The `role` of a model field is ignored."""
    del role
    if choices:
        require(value in choices, field, value, f"choose one of {', '.join(choices)}")
    limits = (
        (least, "at least", operator.ge),
        (above, "above", operator.gt),
        (most, "at most", operator.le),
        (below, "below", operator.lt),
    )
    bounds = [(limit, text, holds) for limit, text, holds in limits if limit is not None]
    remedy = f"must be {' and '.join(f'{text} {limit}' for limit, text, _ in bounds)}"
    require(all(holds(value, limit) for limit, _, holds in bounds), field, value, remedy)

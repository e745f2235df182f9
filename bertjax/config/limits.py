"""The limits of single fields, and helpers that check a field: an error names the field, its value and the remedy."""

from collections.abc import Sequence

from bertjax.common.errors import UserError
from bertjax.config.defaults import RECIPES

AT_LEAST_ONE, AT_LEAST_ZERO, BELOW_ONE = dict(least=1), dict(least=0), dict(least=0, below=1)
REMAT_POLICIES = ("none", "dots", "full")  # the least recomputation first
DTYPES = ("auto", "float32", "bfloat16")
SEED = dict(least=0, below=2**31)
LIMITS: dict[str, dict] = {
    "unroll": dict(choices=("auto", "yes", "no")),
    "kernels": dict(choices=("auto", "no")),
    "dtype": dict(choices=DTYPES),
    "grad_dtype": dict(choices=DTYPES[1:]),
    "seed": SEED,
    "batch_size": AT_LEAST_ONE,
    "microbatches": AT_LEAST_ONE,
    "log_every_steps": AT_LEAST_ONE,
    "hosts_timeout": AT_LEAST_ONE,
    "checkpoint.every_steps": AT_LEAST_ONE,
    "checkpoint.keep": AT_LEAST_ONE,
    "checkpoint.keep_every": AT_LEAST_ZERO,
    "eval.patience": AT_LEAST_ZERO,
    "freeze_layers": AT_LEAST_ZERO,
    "optimizer.beta1": BELOW_ONE,
    "optimizer.beta2": BELOW_ONE,
    "optimizer.weight_decay": BELOW_ONE,
    "optimizer.decay_proportion": dict(above=0, most=1),
    "optimizer.decay": dict(choices=("linear", "sqrt", "cosine")),
    "optimizer.decay_to": BELOW_ONE,
    "optimizer.skip_nonfinite": AT_LEAST_ZERO,
    "optimizer.average": BELOW_ONE,
    "optimizer.layer_decay": dict(above=0, most=1),
    "optimizer.learning_rate": dict(above=0),
    "optimizer.max_grad_norm": dict(above=0),
    "optimizer.epsilon": dict(above=0, below=1),
}
PRETRAINING_LIMITS: dict[str, dict] = LIMITS | {
    "recipe": dict(choices=("", *RECIPES)),
    "remat": dict(choices=(*REMAT_POLICIES, "auto")),
    "optimizer.warmup_steps": AT_LEAST_ZERO,
    "optimizer.warmup_tokens": AT_LEAST_ZERO,
    "eval.every_steps": AT_LEAST_ONE,
    "eval.max_sequences": AT_LEAST_ONE,
    "eval.bits_windows": AT_LEAST_ZERO,
    "eval.memory_length": AT_LEAST_ZERO,
    "eval.clamp_length": AT_LEAST_ZERO,
    "z_loss": AT_LEAST_ZERO,
    "tokenizer.extend": AT_LEAST_ZERO,
    "adapt.positions": AT_LEAST_ZERO,
    "adapt.positions_from": dict(choices=("repeat", "interpolate")),
    "adapt.new_pieces_first": AT_LEAST_ZERO,
    "data.seed": SEED,
    "data.dupe_factor": AT_LEAST_ONE,
    "data.short_seq_prob": BELOW_ONE,
    "data.heldout_fraction": BELOW_ONE,
    "data.masked_lm_prob": dict(above=0, most=0.5),
    "data.next_sentence": dict(choices=("pairs", "none", "order")),
    "data.masking": dict(choices=("static", "dynamic")),
    "data.mix_when": dict(choices=("prepared", "read")),
    "data.layout": dict(choices=("google", "compact")),
    "data.on_corrupt": dict(choices=("stop", "skip")),
    "data.on_bad_document": dict(choices=("stop", "skip")),
    "data.document": dict(choices=("blank_line", "file", "line")),
    "data.cleaning.min_words": AT_LEAST_ZERO,
    "data.cleaning.max_line_documents": AT_LEAST_ZERO,
    "data.cleaning.max_symbols": dict(above=0, most=1),
}
FINE_TUNING_LIMITS = LIMITS | {
    "remat": dict(choices=REMAT_POLICIES),
    "optimizer.warmup_proportion": BELOW_ONE,
    "epochs": dict(above=0),
    "keep_layers": AT_LEAST_ZERO,
    "lora.rank": AT_LEAST_ZERO,
    "lora.alpha": dict(above=0),
    "lora.dropout": BELOW_ONE,
    "max_seq_length": dict(least=8),
    "distill.temperature": dict(above=0),
    "distill.weight": dict(above=0, most=1),
    "restarts": AT_LEAST_ZERO,
    "eval.every_steps": AT_LEAST_ZERO,
}


def require(ok: bool, field: str, value, remedy: str) -> None:
    """Raises `UserError` unless `ok`."""
    if not ok:
        raise UserError(f"config.{field} = {value!r}: {remedy}")


def one_of(config, field: str, choices: Sequence[str]) -> None:
    """Raises `UserError` unless a field has one of these values."""
    value = value_of(config, field)
    require(value in choices, field, value, f"choose one of {', '.join(choices)}")


def at_least_one(config, *fields: str) -> None:
    """Raises `UserError` unless all of these fields are 1 or more."""
    for field in fields:
        value = value_of(config, field)
        require(value >= 1, field, value, "must be at least 1")


def value_of(config, field: str):
    """Returns the value of a field such as "optimizer.learning_rate"."""
    for name in field.split("."):
        config = config[name]
    return config


def within(field: str, value, role="", choices=(), least=None, most=None, above=None, below=None) -> None:
    """Raises `UserError` for a value outside the limits of `config.field`."""
    del role
    if choices:
        require(value in choices, field, value, f"choose one of {', '.join(choices)}")
    limits = [
        (least, f"at least {least}", lambda: value >= least),
        (above, f"above {above}", lambda: value > above),
        (most, f"at most {most}", lambda: value <= most),
        (below, f"below {below}", lambda: value < below),
    ]
    given = [(said, holds()) for limit, said, holds in limits if limit is not None]
    said = " and ".join(said for said, _ in given)
    require(all(holds for _, holds in given), field, value, f"must be {said}")

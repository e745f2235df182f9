"""Checks a config without touching files or devices. An error names the field, its value and the remedy.

The limits of a field are in the tables below, or for `config.model` with the field itself (`config.field`); what
depends on several fields is in the functions. A fine-tuning task, an objective, a family and an optimizer check what is
theirs in their modules, with the helpers below. `tasks.validate` runs all checks.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Sequence

import ml_collections

from bertjax import families
from bertjax.config import UserError, fine_tuning_config
from bertjax.lists import corpus_sources, mixture_of
from bertjax.stages import (
    MOST_BATCH_SIZES,
    changeable,
    changes_of,
    config_in,
    parts_of,
    ramp_of,
    stages_of,
    total_steps,
)
from bertjax.text.tokenizer import KINDS

REMAT_POLICIES = ("none", "dots", "full")  # the least recomputation first
DTYPES = ("auto", "float32", "bfloat16")
AT_LEAST_ONE, AT_LEAST_ZERO, BELOW_ONE = dict(least=1), dict(least=0), dict(least=0, below=1)
SEED = dict(least=0, below=2**31)
LIMITS = {
    "tokenizer.kind": dict(choices=tuple(KINDS)),
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
PRETRAINING_LIMITS = LIMITS | {
    "remat": dict(choices=(*REMAT_POLICIES, "auto")),
    "optimizer.warmup_steps": AT_LEAST_ZERO,
    "optimizer.warmup_tokens": AT_LEAST_ZERO,
    "eval.every_steps": AT_LEAST_ONE,
    "eval.max_sequences": AT_LEAST_ONE,
    "eval.bits_windows": AT_LEAST_ZERO,
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
STAGE_LIMITS = {
    "steps": AT_LEAST_ZERO,
    "tokens": AT_LEAST_ZERO,
    "length": dict(least=8),
    "max_predictions_per_seq": AT_LEAST_ZERO,
    "ramp_from": AT_LEAST_ZERO,
    "ramp_tokens": AT_LEAST_ZERO,
}


def require(ok: bool, field: str, value, remedy: str) -> None:
    """Raises `UserError` unless `ok`."""
    if not ok:
        raise UserError(f"config.{field} = {value!r}: {remedy}")


def one_of(config, field: str, choices: Sequence[str]) -> None:
    value = value_of(config, field)
    require(value in choices, field, value, f"choose one of {', '.join(choices)}")


def at_least_one(config, *fields: str) -> None:
    for field in fields:
        value = value_of(config, field)
        require(value >= 1, field, value, "must be at least 1")


def value_of(config, field: str):
    """Returns the value of a field such as "optimizer.learning_rate"."""
    for name in field.split("."):
        config = config[name]
    return config


def validate_pretraining(config: ml_collections.ConfigDict, with_data: bool = True) -> None:
    """Raises `UserError` if a config is not a valid config of pre-training.

    `with_data`: also require the text or the records.
    """
    require(config.task == "pretraining", "task", config.task, "this command is for pre-training")
    _validate_common(config, PRETRAINING_LIMITS)
    language = config.data.language
    code = re.fullmatch("[a-z]{2,3}(-[a-z]+)*", language)
    require(bool(code), "data.language", language, "must be an ISO 639 code, such as 'en' or 'de'")
    _split("data.masked_lm_split", config.data.masked_lm_split)
    _validate_adaptation(config, with_data)
    random = "would be random as well: set init_checkpoint, or 0"
    require(bool(config.init_checkpoint) or not config.freeze_layers, "freeze_layers", config.freeze_layers, random)
    _validate_stages(config)
    if config.data.stream:
        _validate_stream(config)
    for each in stages_of(config):
        families.FAMILIES.get(config.model.family).validate(config_in(config, each))
        if corpus_sources(config) or config.data.mix_when == "prepared":
            mixture_of(config_in(config, each))
    none = (
        "no text is held out, by whose score a run could stop early: set heldout_fraction above 0, or eval.patience=0"
    )
    is_scored = config.data.heldout_fraction > 0 or bool(config.data.records) or not config.eval.patience
    require(is_scored, "data.heldout_fraction", config.data.heldout_fraction, none)
    for text in config.eval.fill_masks:
        require(isinstance(text, str) and "[MASK]" in text, "eval.fill_masks", text, "each text needs a [MASK]")
    require(
        not with_data or bool(config.data.records or config.branch_from or corpus_sources(config)),
        "data.corpus",
        config.data.corpus,
        "say where the text is (files, a folder, a glob, gs://..., hf:NAME, tfds:NAME, pydoc) or set data.records",
    )


def require_memory(config) -> None:
    """Raises `UserError` if rows go on in the next step (`data.stream`), and the model cannot."""
    family = config.model.family
    none = f"model.family = {family!r} has no memory, with which a row goes on; choose one that has, or set False"
    has_memory = families.FAMILIES.get(family).new_memory is not None
    require(has_memory or not config.data.stream, "data.stream", config.data.stream, none)


def _validate_stream(config) -> None:
    if not config.adapt.model:  # the model is not known yet
        require_memory(config)
    apart = "rows that go on in the next step have one text each; set False"
    require(not config.packing, "packing", True, apart)
    why = "a stream of text is cut into whole sequences, once"
    for field, needed in (("next_sentence", "none"), ("masking", "dynamic"), ("dupe_factor", 1), ("short_seq_prob", 0)):
        value = config.data[field]
        require(value == needed, f"data.{field}", value, f"{why}; set {needed}, or data.stream=False")
    for each in stages_of(config):
        one = (
            f"rows go on in the next step, so all stages have batch_size = {config.batch_size}; set it, or leave it out"
        )
        field = "ramp_from" if each.grows else "batch_size"
        require(each.batch_size == config.batch_size, f"stages.{each.name}.{field}", each.batch_size, one)


def _validate_adaptation(config, with_data: bool) -> None:
    start, extend, adapt = config.init_checkpoint, config.tokenizer.extend, config.adapt
    for field, value in (
        ("tokenizer.extend", extend),
        ("adapt.model", adapt.model),
        ("adapt.positions", adapt.positions),
    ):
        none = "there is nothing to adapt: set init_checkpoint to the workdir of a run, or a Hugging Face folder"
        require(bool(start) or not value, field, value, none)
        own = "only the model of init_checkpoint itself can be made larger: also set adapt.model=True"
        require(adapt.model or not value, field, value, own)
    corpus, windows = corpus_sources(config), config.eval.bits_windows
    none = f"eval.bits_windows = {windows} are of held-out text of data.corpus; set it, or 0 there"
    require(bool(corpus) or not (with_data and windows), "data.corpus", value_of(config, "data.corpus"), none)
    kind = config.tokenizer.kind
    whole = f"tokenizer.kind = {kind!r} has all the pieces that there are; set 0"
    require(not extend or KINDS[kind].extends, "tokenizer.extend", extend, whole)
    still = "new pieces cannot be learnt where the embeddings are frozen: set 0"
    require(not (extend and config.freeze_layers), "freeze_layers", config.freeze_layers, still)
    none = "there are no new pieces to train first: set tokenizer.extend, or 0"
    require(bool(extend) or not adapt.new_pieces_first, "adapt.new_pieces_first", adapt.new_pieces_first, none)


def validate_fine_tuning(config: ml_collections.ConfigDict, with_data: bool = True) -> None:
    """Raises `UserError` if a field that all fine-tuning tasks share is invalid; `with_data`: also require the data."""
    _validate_common(config, FINE_TUNING_LIMITS)
    one = f'applies to searches only; for a single run also set --config.sweep="seed={config.seed}"'
    require(bool(config.sweep) or not config.restarts, "restarts", config.restarts, one)
    lstm_size = config.head.get("lstm_size", 0)
    require(lstm_size >= 0, "head.lstm_size", lstm_size, "must be at least 1, or 0 for no BiLSTM")
    if "lstm_layers" in config.head:
        at_least_one(config, "head.lstm_layers")
        more = "lstm_layers needs a BiLSTM: also set head.lstm_size"
        require(config.head.lstm_layers == 1 or lstm_size > 0, "head.lstm_layers", config.head.lstm_layers, more)
    within("head.label_smoothing", config.head.get("label_smoothing", 0.0), **BELOW_ONE)
    both = "does not know the weights of head.class_weights; leave one of them out"
    weights = config.head.get("class_weights", "")
    require(not (config.distill.teacher and weights), "distill.teacher", config.distill.teacher, both)
    for field in ("temperature", "weight"):
        is_used = config.distill.teacher or config.distill[field] == fine_tuning_config("").distill[field]
        none = "there is no teacher: set distill.teacher, or leave it out"
        require(bool(is_used), f"distill.{field}", config.distill[field], none)
    for field in ("alpha", "dropout", "targets"):
        is_used = config.lora.rank or config.lora[field] == fine_tuning_config("").lora[field]
        none = "there are no low-rank updates: set lora.rank, or leave it out"
        require(bool(is_used), f"lora.{field}", config.lora[field], none)
    targets = config.lora.targets
    is_named = not config.lora.rank or all(map(str.strip, targets.split(",")))
    require(is_named, "lora.targets", targets, "name kernels, such as query,value, or attention, or all-linear")
    whole = "a BiLSTM (head.lstm_size) reads whole rows, which sequences cannot share; set False"
    require(not (config.packing and lstm_size), "packing", config.packing, whole)
    if with_data:
        require(bool(config.data.path), "data.path", config.data.path, "say where the data is: a folder, or tfds:NAME")
        require(
            bool(config.init_checkpoint),
            "init_checkpoint",
            config.init_checkpoint,
            "say what to fine-tune: the workdir of a run, a Hugging Face folder, or Google's bert_model.ckpt",
        )


def _validate_common(config, limits: dict[str, dict]) -> None:
    for field, limit in limits.items():
        within(field, value_of(config, field), **limit)
    validate_model(config)
    one = "layers that are recomputed must stay in a scan, or the compiler undoes it: set unroll=auto, or remat=none"
    require(config.unroll != "yes" or config.remat in ("none", "auto"), "unroll", config.unroll, one)
    fused = config.model.get("attention") == "fused"
    none = "model.attention = 'fused' asks for one; set attention=auto, or kernels=auto"
    require(not (config.kernels == "no" and fused), "kernels", config.kernels, none)
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every
    require(kept % every == 0, "checkpoint.keep_every", kept, f"must be a multiple of every_steps = {every}, or 0")
    _profile(config.profile)
    factor = config.watchdog
    require(factor == 0 or factor > 1, "watchdog", factor, "must be above 1, or 0 for none")

    batch, microbatches = config.batch_size, config.microbatches
    require(batch % microbatches == 0, "batch_size", batch, f"must be a multiple of microbatches = {microbatches}")

    for axis, size in config.mesh.items():
        require(size == -1 or size >= 1, f"mesh.{axis}", size, "must be at least 1, or -1 for the remaining devices")
    require(list(config.mesh.values()).count(-1) <= 1, "mesh", dict(config.mesh), "only one axis can be -1")
    _validate_numbers(config)
    family = families.FAMILIES.get(config.model.family)
    whole = f"model.family = {config.model.family!r} reads whole rows, which sequences cannot share; set False"
    require(not config.packing or family.packs, "packing", config.packing, whole)
    family.validate(config)


def validate_model(config) -> None:
    """Raises `UserError` if `config.model` describes no model."""
    known_fields = dataclasses.fields(families.FAMILIES.get(config.model.family).config)
    known, given = {field.name for field in known_fields}, set(config.model)
    if families.is_adopted(config):  # also fields of the checkpoint's family
        given -= families.all_fields() - known
    if different := known ^ given:
        raise UserError(
            f"config.model.family = {config.model.family!r}: its models do not have the fields of this config, such as "
            f"{min(different)}; begin with an experiment of the family, or set config.model = "
            f"families.model_fields({config.model.family!r}) in one"
        )
    for known in known_fields:
        within(f"model.{known.name}", config.model[known.name], **known.metadata)
    hidden, heads = config.model.hidden_size, config.model.get("num_attention_heads", 1)
    remedy = f"must be a multiple of model.num_attention_heads = {heads}"
    require("head_dim" in config.model or hidden % heads == 0, "model.hidden_size", hidden, remedy)


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


def _validate_numbers(config, prefix: str = "") -> None:
    """Checks that all numbers are finite, and that whole numbers fit the 32 bits that devices have for them."""
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            _validate_numbers(value, f"{prefix}{name}.")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                require(math.isfinite(number), f"{prefix}{name}", value, "must be finite")
            elif isinstance(number, int):
                require(abs(number) < 2**31, f"{prefix}{name}", value, "must be below 2 ** 31")


def _profile(steps: str) -> None:
    start, _, stop = steps.partition(":")
    is_valid = start.isdecimal() and stop.isdecimal() and 1 <= int(start) <= int(stop)
    remedy = "write START:STOP, such as 20:24 for steps 20 to 24; the first step is 1, and STOP is not before START"
    require(not steps or is_valid, "profile", steps, remedy)


def _validate_stages(config) -> None:
    # With adapt.model, the number of positions becomes known with the checkpoint.
    stages, limit = config.stages, math.inf if config.adapt.model else config.model.max_position_embeddings
    remedy = "must be one or more named stages: named_stages(short=stage(steps, length, max_predictions_per_seq))"
    is_named = isinstance(stages, ml_collections.ConfigDict) and len(stages) > 0
    is_valid = is_named and all(isinstance(stage, ml_collections.ConfigDict) for stage in stages.values())
    require(is_valid, "stages", stages.to_dict() if hasattr(stages, "to_dict") else stages, remedy)
    for name, given in stages.items():
        for field, limits in STAGE_LIMITS.items():
            kinds = (int, float) if field.endswith("tokens") else int
            is_number = isinstance(given.get(field, 0), kinds)
            require(is_number, f"stages.{name}.{field}", given.get(field), "must be a whole number")
            within(f"stages.{name}.{field}", given.get(field, 0), **limits)
        has_tokens = given.get("tokens", 0) > 0
        both = "a stage has steps or tokens, not both: set one of them to 0"
        require(not (has_tokens and given.steps), f"stages.{name}.tokens", given.get("tokens"), both)
        neither = "must be at least 1, or tokens above 0 in its place: stage(0, length, ..., tokens=1e9)"
        require(has_tokens or given.steps >= 1, f"stages.{name}.steps", given.steps, neither)
        _validate_changes(config, name, given)
        _validate_ramp(config, name, given)
        _validate_predictions(config, name, given, limit)
    if config.data.masking == "static":
        most = {given.length: given.max_predictions_per_seq for given in stages.values()}
        for name, given in stages.items():
            one = f"stages of one length share records, whose max_predictions_per_seq is {most[given.length]}"
            field = f"stages.{name}.max_predictions_per_seq"
            require(given.max_predictions_per_seq == most[given.length], field, given.max_predictions_per_seq, one)
    _validate_order(stages)
    require(total_steps(config) < 2**31, "stages", total_steps(config), "must have fewer than 2 ** 31 steps in all")


def _validate_order(stages) -> None:
    """Checks that stages of one length are written in the order of training: that of their names."""
    for length in {given.length for given in stages.values()}:
        written = [name for name in json.loads(stages.to_json_best_effort()) if stages[name].length == length]
        for one, other in itertools.pairwise(written):
            order = "stages of one length are trained in the order of their names; rename one of them"
            remedy = f"would be trained before {one!r}, though it is written after it: {order}"
            require(one < other, "stages", other, remedy)


def _validate_changes(config, name: str, given) -> None:
    """Checks what a stage changes, as if the whole config had it."""
    known, limits = changeable(config), dict(PRETRAINING_LIMITS)
    for model in families.configs_that_may_be(config):
        limits |= {f"model.{field.name}": field.metadata for field in dataclasses.fields(model)}
    copy = config.copy_and_resolve_references().unlock()
    for field, value in changes_of(given).items():
        what = f"is nothing that a stage may change; choose among {', '.join(known)}"
        require(field in known, f"stages.{name}.{field}", value, what)
        section, _, last = field.rpartition(".")
        if section == "model" and last not in copy.model:  # the family becomes known with the checkpoint
            families.add_field(copy, last)
        try:
            if value is None:
                raise TypeError
            (copy[section] if section else copy)[last] = value
        except TypeError:
            example = f"must be such as {value_of(copy, field)!r}"
            require(False, f"stages.{name}.{field}", value, example)
        within(f"stages.{name}.{field}", value, **limits.get(field, {}))
        dynamic = "masks of records stay what they are; set data.masking=dynamic, or leave it out"
        is_mask = field.startswith("data.masked") and config.data.masking == "static"
        require(not is_mask, f"stages.{name}.{field}", value, dynamic)
        apart = "records that are mixed when they are prepared stay what they are; set data.mix_when=read"
        is_mixed = field == "data.mixture" and config.data.mix_when == "prepared"
        require(not is_mixed, f"stages.{name}.{field}", value, apart)
    _split(f"stages.{name}.data.masked_lm_split", given.get("data", {}).get("masked_lm_split"))


def _validate_ramp(config, name: str, given) -> None:
    """Checks the batch sizes of a stage."""
    batch_size = given.get("batch_size", config.batch_size)
    microbatches = given.get("microbatches", config.microbatches)
    first, tokens = given.get("ramp_from", 0), given.get("ramp_tokens", 0.0)
    for size in {batch_size, first} - {0}:
        field = "batch_size" if size == batch_size else "ramp_from"
        remedy = f"must be a multiple of microbatches = {microbatches}"
        require(size % microbatches == 0, f"stages.{name}.{field}", size, remedy)
    both = "a batch that grows needs both: ramp_from, its first size, and ramp_tokens above 0"
    require(bool(first) == bool(tokens), f"stages.{name}.ramp_from", first, both)
    require(first < batch_size, f"stages.{name}.ramp_from", first, f"must be below batch_size = {batch_size}")
    sizes = -(-batch_size // first) if first else 1
    many = f"makes {sizes} batch sizes, each of which compiles the step again; choose one that makes {MOST_BATCH_SIZES}"
    require(sizes <= MOST_BATCH_SIZES, f"stages.{name}.ramp_from", first, f"{many} at most")
    growing = ramp_of(given, batch_size)
    none = "too few: no batch size gets a whole step"
    require(all(steps for steps, _ in growing), f"stages.{name}.ramp_tokens", tokens, none)
    parts = parts_of(given, batch_size)
    few = f"too few for one step of {batch_size} sequences of {given.length}"
    require(bool(parts), f"stages.{name}.tokens", given.get("tokens", 0.0), few)
    longer = "the stage ends before its batch is whole: choose fewer, or make it longer"
    require(not growing or not parts[-1][2], f"stages.{name}.ramp_tokens", tokens, longer)


def _validate_predictions(config, name: str, given, limit: int) -> None:
    length, predictions = (f"stages.{name}.{x}" for x in ("length", "max_predictions_per_seq"))
    longer = f"longer than the position table, model.max_position_embeddings = {limit}"
    require(given.length <= limit, length, given.length, longer)
    share = given.get("data", {}).get("masked_lm_prob", config.data.masked_lm_prob)
    # Rounded down: 19 predictions of 128 tokens (19.2) are enough; the paper has 20, which are 15.6 %.
    needed = int(share * given.length)
    few = f"too small for data.masked_lm_prob = {share} of {given.length} tokens: use at least {needed}"
    require(given.max_predictions_per_seq >= needed, predictions, given.max_predictions_per_seq, few)
    more = f"more than the sequence's {given.length} tokens"
    require(given.max_predictions_per_seq <= given.length, predictions, given.max_predictions_per_seq, more)


def _split(field: str, split) -> None:
    """Checks shares of masked tokens; None: there are none."""
    is_split = split is None or (len(split) == 3 and min(split) >= 0 and math.isclose(sum(split), 1))
    remedy = "must be three shares that add up to 1: replaced by [MASK], by a random piece, left as they are"
    require(is_split, field, split, remedy)

"""Checks a config without touching files or devices. An error names the field, its value and the remedy.

This module checks the fields of pre-training and of all fine-tuning tasks. A fine-tuning task checks its own fields in
its module, with the helpers below. `tasks.validate` runs all checks.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import ml_collections

from bertjax import families
from bertjax.config import UserError, corpus_sources, mixture_of

TOKENIZER_KINDS = ("wordpiece", "sentencepiece", "bytes", "bpe")
REMAT_POLICIES = ("none", "dots", "full")  # the least recomputation first
DTYPES = ("auto", "float32", "bfloat16")
NEXT_SENTENCE = ("pairs", "none", "order")
MASKING = ("static", "dynamic")
LAYOUTS = ("google", "compact")


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


def share(config, *fields: str) -> None:
    for field in fields:
        value = value_of(config, field)
        require(0 <= value < 1, field, value, "must be at least 0 and below 1")


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
    _validate_common(config)
    warmup, masked = config.optimizer.warmup_steps, config.data.masked_lm_prob
    require(warmup >= 0, "optimizer.warmup_steps", warmup, "must be at least 0")
    at_least_one(config, "eval.every_steps", "eval.max_sequences", "data.dupe_factor")
    share(config, "data.short_seq_prob", "data.heldout_fraction")
    _seed(config, "data.seed")
    found = config.tokenizer.path or config.data.records or config.init_checkpoint
    learnt = "is not learnt here: set tokenizer.path to the tokenizer.json of a GPT-2, or choose another"
    require(config.tokenizer.kind != "bpe" or bool(found), "tokenizer.kind", "bpe", learnt)
    language = config.data.language
    code = re.fullmatch("[a-z]{2,3}(-[a-z]+)*", language)
    require(bool(code), "data.language", language, "must be an ISO 639 code, such as 'en' or 'de'")
    require(0 < masked <= 0.5, "data.masked_lm_prob", masked, "must be above 0 and at most 0.5")
    one_of(config, "data.next_sentence", NEXT_SENTENCE)
    one_of(config, "data.masking", MASKING)
    one_of(config, "data.layout", LAYOUTS)
    one_of(config, "data.on_corrupt", ("stop", "skip"))
    one_of(config, "data.on_bad_document", ("stop", "skip"))
    one_of(config, "data.document", ("blank_line", "file", "line"))
    split = config.data.masked_lm_split
    is_split = len(split) == 3 and min(split) >= 0 and math.isclose(sum(split), 1)
    remedy = "must be three shares that add up to 1: replaced by [MASK], by a random piece, left as they are"
    require(is_split, "data.masked_lm_split", split, remedy)
    _validate_cleaning(config.data.cleaning)
    mixture_of(config)
    _validate_stages(config)
    for text in config.eval.fill_masks:
        require(isinstance(text, str) and "[MASK]" in text, "eval.fill_masks", text, "each text needs a [MASK]")
    require(
        not with_data or bool(config.data.records) or bool(corpus_sources(config)),
        "data.corpus",
        config.data.corpus,
        "say where the text is (files, a folder, a glob, gs://..., hf:NAME, tfds:NAME, pydoc) or set data.records",
    )


def validate_fine_tuning(config: ml_collections.ConfigDict, with_data: bool = True) -> None:
    """Raises `UserError` if a field that all fine-tuning tasks share is invalid; `with_data`: also require the data."""
    _validate_common(config)
    share(config, "optimizer.warmup_proportion")
    require(config.epochs > 0, "epochs", config.epochs, "must be above 0")
    require(config.max_seq_length >= 8, "max_seq_length", config.max_seq_length, "must be at least 8")
    require(config.restarts >= 0, "restarts", config.restarts, "must be at least 0")
    one = f'applies to searches only; for a single run also set --config.sweep="seed={config.seed}"'
    require(bool(config.sweep) or not config.restarts, "restarts", config.restarts, one)
    lstm_size = config.head.get("lstm_size", 0)
    require(lstm_size >= 0, "head.lstm_size", lstm_size, "must be at least 1, or 0 for no BiLSTM")
    if "lstm_layers" in config.head:
        at_least_one(config, "head.lstm_layers")
        more = "lstm_layers needs a BiLSTM: also set head.lstm_size"
        require(config.head.lstm_layers == 1 or lstm_size > 0, "head.lstm_layers", config.head.lstm_layers, more)
    whole = "a BiLSTM (head.lstm_size) reads whole rows, which sequences cannot share; set False"
    require(not (config.packing and lstm_size), "packing", config.packing, whole)
    require(config.eval.every_steps >= 0, "eval.every_steps", config.eval.every_steps, "must be at least 0")
    if with_data:
        require(bool(config.data.path), "data.path", config.data.path, "say where the data is: a folder, or tfds:NAME")
        require(
            bool(config.init_checkpoint),
            "init_checkpoint",
            config.init_checkpoint,
            "say what to fine-tune: the workdir of a run, a Hugging Face folder, or Google's bert_model.ckpt",
        )


def _validate_common(config) -> None:
    one_of(config, "tokenizer.kind", TOKENIZER_KINDS)
    validate_model(config)
    one_of(config, "remat", (*REMAT_POLICIES, "auto") if config.task == "pretraining" else REMAT_POLICIES)
    one_of(config, "unroll", ("auto", "yes", "no"))
    one = "layers that are recomputed must stay in a scan, or the compiler undoes it: set unroll=auto, or remat=none"
    require(config.unroll != "yes" or config.remat in ("none", "auto"), "unroll", config.unroll, one)
    one_of(config, "dtype", DTYPES)
    one_of(config, "grad_dtype", DTYPES[1:])

    at_least_one(config, "batch_size", "microbatches", "log_every_steps", "hosts_timeout")
    at_least_one(config, "checkpoint.every_steps", "checkpoint.keep")
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every
    require(
        kept >= 0 and kept % every == 0,
        "checkpoint.keep_every",
        kept,
        f"must be a multiple of every_steps = {every}, or 0",
    )
    _seed(config, "seed")
    _profile(config.profile)
    share(config, "optimizer.beta1", "optimizer.beta2", "optimizer.weight_decay")
    decaying = config.optimizer.decay_proportion
    require(0 < decaying <= 1, "optimizer.decay_proportion", decaying, "must be above 0 and at most 1")
    skips, factor = config.optimizer.skip_nonfinite, config.watchdog
    require(skips >= 0, "optimizer.skip_nonfinite", skips, "must be at least 0")
    require(factor == 0 or factor > 1, "watchdog", factor, "must be above 1, or 0 for none")
    for name, limit in (("learning_rate", math.inf), ("max_grad_norm", math.inf), ("epsilon", 1)):
        remedy = "must be above 0" + f" and below {limit}" * (limit == 1)
        require(0 < config.optimizer[name] < limit, f"optimizer.{name}", config.optimizer[name], remedy)

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
    for known in dataclasses.fields(families.FAMILIES.get(config.model.family).config):
        _within(f"model.{known.name}", config.model[known.name], **known.metadata)
    hidden, heads = config.model.hidden_size, config.model.get("num_attention_heads", 1)
    remedy = f"must be a multiple of model.num_attention_heads = {heads}"
    require(hidden % heads == 0, "model.hidden_size", hidden, remedy)


def _within(field: str, value, role="", choices=(), least=None, most=None, above=None, below=None) -> None:
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


def _validate_cleaning(cleaning) -> None:
    for name in ("min_words", "max_line_documents"):
        require(cleaning[name] >= 0, f"data.cleaning.{name}", cleaning[name], "must be at least 0")
    share = cleaning.max_symbols
    require(0 < share <= 1, "data.cleaning.max_symbols", share, "must be above 0 and at most 1")


def _profile(steps: str) -> None:
    start, _, stop = steps.partition(":")
    is_valid = start.isdecimal() and stop.isdecimal() and 1 <= int(start) <= int(stop)
    remedy = "write START:STOP, such as 20:24 for steps 20 to 24; the first step is 1, and STOP is not before START"
    require(not steps or is_valid, "profile", steps, remedy)


def _seed(config, field: str) -> None:
    value = value_of(config, field)
    require(0 <= value < 2**31, field, value, "must be at least 0 and below 2 ** 31")


def _validate_stages(config) -> None:
    stages, limit = config.stages, config.model.max_position_embeddings
    remedy = "must be one or more named stages: named_stages(short=stage(steps, length, max_predictions_per_seq))"
    is_named = isinstance(stages, ml_collections.ConfigDict) and len(stages) > 0
    is_valid = is_named and all(isinstance(stage, ml_collections.ConfigDict) for stage in stages.values())
    require(is_valid, "stages", stages.to_dict() if hasattr(stages, "to_dict") else stages, remedy)
    lengths = [stage.length for stage in stages.values()]
    require(len(set(lengths)) == len(lengths), "stages", lengths, "each stage needs a different length")
    for name, stage in stages.items():
        steps, length, predictions = (f"stages.{name}.{x}" for x in ("steps", "length", "max_predictions_per_seq"))
        require(stage.steps >= 1, steps, stage.steps, "must be at least 1")
        require(stage.length >= 8, length, stage.length, "must be at least 8")
        longer = f"longer than the position table, model.max_position_embeddings = {limit}"
        require(stage.length <= limit, length, stage.length, longer)
        # Rounded down: 19 predictions of 128 tokens (19.2) are enough; the paper has 20, which are 15.6 %.
        needed = int(config.data.masked_lm_prob * stage.length)
        require(
            stage.max_predictions_per_seq >= needed,
            predictions,
            stage.max_predictions_per_seq,
            f"too small for data.masked_lm_prob = {config.data.masked_lm_prob} of {stage.length} tokens: use at least "
            f"{needed}",
        )
        more = f"more than the sequence's {stage.length} tokens"
        require(stage.max_predictions_per_seq <= stage.length, predictions, stage.max_predictions_per_seq, more)

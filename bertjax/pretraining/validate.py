"""Checks a config without touching files or devices. An error names the field, its value and the remedy.

The limits of a field are in the tables below, or for `config.model` with the field itself (`config.field`); what
depends on several fields is in the functions. A fine-tuning task, an objective, a family and an optimizer check what is
theirs in their modules, with the helpers in `checks`. `tasks.validate` runs all checks.
"""

import dataclasses
import math
import re

import ml_collections

from bertjax.common.errors import UserError
from bertjax.config import budget
from bertjax.config.defaults import RECIPES, fine_tuning_config
from bertjax.config.limits import AT_LEAST_ONE, AT_LEAST_ZERO, BELOW_ONE, at_least_one, require, value_of, within
from bertjax.config.lists import corpus_sources, mixture_of
from bertjax.config.stages import config_in, stages_of
from bertjax.models import families
from bertjax.pretraining.validate_stages import split_of_masks, validate_stages
from bertjax.text.tokenizer import KINDS

REMAT_POLICIES = ("none", "dots", "full")  # the least recomputation first
DTYPES = ("auto", "float32", "bfloat16")
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


def validate_pretraining(config: ml_collections.ConfigDict, with_data: bool = True) -> None:
    """Raises `UserError` if a config is not a valid config of pre-training.

    `with_data`: also require the text or the records.
    """
    require(config.task == "pretraining", "task", config.task, "this command is for pre-training")
    _validate_common(config, PRETRAINING_LIMITS)
    language = config.data.language
    code = re.fullmatch("[a-z]{2,3}(-[a-z]+)*", language)
    require(bool(code), "data.language", language, "must be an ISO 639 code, such as 'en' or 'de'")
    split_of_masks("data.masked_lm_split", config.data.masked_lm_split)
    _validate_adaptation(config, with_data)
    random = "would be random as well: set init_checkpoint, or 0"
    require(bool(config.init_checkpoint) or not config.freeze_layers, "freeze_layers", config.freeze_layers, random)
    if config.recipe:
        adapted = "a recipe trains from random params; use --config=adapt with a budget, or leave it out"
        require(not (config.init_checkpoint or config.adapt.model), "init_checkpoint", config.init_checkpoint, adapted)
    validate_stages(config, PRETRAINING_LIMITS)
    if config.data.stream:
        _validate_stream(config)
    for field in ("memory_length", "clamp_length"):
        value, is_known = config.eval[field], config.data.stream and field in config.model
        none = f"is of rows that go on (data.stream) in a model with model.{field}; set 0"
        require(is_known or not value or config.adapt.model, f"eval.{field}", value, none)
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
    apart = "rows that go on in the next step (data.stream) are full, and their memory is of one text; set False"
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
    single = "is for single runs; set epochs for the trials of a search, or leave out sweep"
    require(not (config.sweep and config.budget), "budget", config.budget, single)
    tokens = "fine-tuning takes a time, such as 20min"
    is_time = not config.budget or math.isfinite(budget.parse(config.budget).seconds)
    require(is_time, "budget", config.budget, tokens)
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
    if config.budget:
        budget.parse(config.budget)
    needs = f"a recipe needs one, such as {budget.EXAMPLES}"
    require(bool(config.budget or not config.get("recipe")), "budget", config.budget, needs)
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

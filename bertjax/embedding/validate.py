"""Checks of the fields of the task `embed`."""

import ml_collections
from ml_collections import ConfigDict

from bertjax.config.defaults import fine_tuning_config
from bertjax.config.limits import one_of, require, within
from bertjax.embedding.datasets import (
    BATCHINGS,
    EXAMPLES,
    PROMPTS,
    SAMPLINGS,
    SECTION,
    TEMPERATURE,
    WEIGHTS,
    dev_set,
    training_sets,
)
from bertjax.embedding.forms import FORMS, JUDGES
from bertjax.embedding.head import widths_of_loss
from bertjax.embedding.loss_settings import NAMES, LossSettings
from bertjax.embedding.losses import DISTANCES
from bertjax.embedding.teacher_targets import LISTS, TARGETS, VECTORS


def validate(config: ConfigDict) -> None:
    """Raises `UserError` for invalid values of the fields that only this task has."""
    one_of(config, "head.pooling", ("mean", "cls", "last"))
    one_of(config, "head.dense_act", ("none", "tanh"))
    dense, loss = config.head.dense, config.loss
    require(dense >= 0, "head.dense", dense, "must be the width of a dense layer, or 0 for none")
    require(loss.temperature > 0, "loss.temperature", loss.temperature, "must be above 0")
    require(0 < loss.margin <= 2, "loss.margin", loss.margin, "must be above 0 and at most 2: a cosine's range")
    widths_of_loss(config)
    within("batch_by", config.get("batch_by", EXAMPLES), choices=BATCHINGS)
    require(
        config.batch_size > 1,
        "batch_size",
        config.batch_size,
        "must be at least 2: the loss compares the examples of a batch",
    )
    _validate_sets(config)
    _validate_losses(config)
    _validate_teacher(config)


def _validate_losses(config: ConfigDict) -> None:
    settings, sources = LossSettings(**config.loss), training_sets(config.data).values()
    names = settings.names
    for value_type, name in names.items():
        forms = [form for form, reader in FORMS.items() if reader.value_type is value_type]
        is_used = settings.name == "" or name == NAMES[value_type][0] or any(source.form in forms for source in sources)
        unused = f"{name} trains on the forms {', '.join(forms)}, which no training set has; leave {name} out"
        require(is_used, "loss.name", settings.name, unused)
    _validate_guide(config, settings)
    within("loss.distance_metric", settings.distance_metric, choices=tuple(DISTANCES))
    margin, most = settings.triplet_margin, 2 if settings.distance_metric == "cosine" else None
    within("loss.triplet_margin", margin, above=0, most=most)
    if names[None] == "triplet":
        inside = "cannot be combined with loss.name=triplet, which has no in-batch negatives; leave it out"
        require(not settings.symmetric, "loss.symmetric", settings.symmetric, inside)
        for source in sources:
            negative = "the loss triplet needs form=pairs with negatives, such as texts=anchor,positive,negative"
            source.require(source.has_negatives or FORMS[source.form].value_type is not None, "texts", negative)
    else:
        for field in ("distance_metric", "triplet_margin"):
            value = getattr(settings, field)
            is_default = value == getattr(LossSettings, field)
            require(is_default, f"loss.{field}", value, "applies to the loss triplet; set loss.name=triplet")


def _validate_guide(config: ConfigDict, settings: LossSettings) -> None:
    guide, margin = settings.guide, settings.guide_margin
    require(0 <= margin <= 2, "loss.guide_margin", margin, "must be at least 0 and at most 2: a cosine's range")
    require(bool(guide) or not margin, "loss.guide_margin", margin, "needs a guide: set loss.guide")
    has_texts = any(FORMS[source.form].value_type is None for source in training_sets(config.data).values())
    in_batch = "selects in-batch negatives of the loss infonce, which no training set has; leave loss.guide out"
    require(not guide or (has_texts and settings.names[None] == "infonce"), "loss.guide", guide, in_batch)
    symmetric = "cannot be combined with loss.symmetric; leave one of the two out"
    require(not (guide and settings.symmetric), "loss.guide", guide, symmetric)


def _validate_sets(config: ConfigDict) -> None:
    for name, fields in config.data.sets.items():
        fields = fields.to_dict() if isinstance(fields, ml_collections.ConfigDict) else fields
        is_set = isinstance(fields, dict) and fields.keys() - {*PROMPTS} == {*SECTION, "weight"}
        require(is_set, f"data.sets.{name}", fields, "must be text_set(path, ...), as in experiments/embed.py")
    for source in (*training_sets(config.data).values(), dev_set(config.data)):
        source.validate()
    _validate_sampling(config.data)
    dev = dev_set(config.data).form
    judging = f"single texts allow no evaluation; set data.dev.path, and data.dev.form to one of {', '.join(JUDGES)}"
    require(dev in JUDGES, "data.dev.form", dev, judging)


def _validate_sampling(data: ConfigDict) -> None:
    sampling, temperature = data.get("sampling", WEIGHTS), data.get("temperature", 1.0)
    within("data.sampling", sampling, choices=SAMPLINGS)
    within("data.temperature", temperature, above=0)
    is_default, several = sampling == WEIGHTS, "needs several training sets: add data.sets, or leave the field out"
    require(is_default or len(data.sets) > 0, "data.sampling", sampling, several)
    unused = "applies to data.sampling=temperature; set data.sampling, or leave the field out"
    require(sampling == TEMPERATURE or temperature == 1, "data.temperature", temperature, unused)
    for source in training_sets(data).values():
        weight = f"has no effect with data.sampling={sampling}; leave the weight out, or set data.sampling=weights"
        source.require(is_default or source.weight == 1, "weight", weight)


def _validate_teacher(config: ConfigDict) -> None:
    distill, default = config.distill, fine_tuning_config("").distill
    one_of(config, "distill.what", tuple(TARGETS))
    sources = training_sets(config.data).values()
    has_scores = any(source.score_columns for source in sources)
    none = "needs a teacher: set distill.teacher, or name the columns of the scores of all documents in data.label"
    is_vectors, is_list = distill.what == VECTORS, distill.what == LISTS
    require(bool(distill.teacher) or is_vectors or has_scores, "distill.what", distill.what, none)
    divides = "applies to logits, and the targets are vectors or scores; leave the field out"
    require(is_list or distill.temperature == default.temperature, "distill.temperature", distill.temperature, divides)
    for field in ("student_temperature", "teacher_temperature"):
        value = distill.get(field, 0.0)
        require(value >= 0, f"distill.{field}", value, "must be above 0, or 0 for the value of distill.temperature")
        require(is_list or not value, f"distill.{field}", value, "applies to distill.what=kl; leave the field out")
    same = "single texts have no scores of pairs; set distill.what=vectors"
    is_scored = all(source.form != "sentences" for source in sources)
    require(not distill.teacher or is_scored or is_vectors, "distill.what", distill.what, same)
    if is_list:
        negatives = "distill.what=kl needs form=pairs with negatives, such as texts=anchor,positive,negative"
        for source in sources:
            source.require(source.has_negatives, "texts", negatives)
    both = "cannot be combined with the scores of documents in data.label; leave one of the two out"
    require(not (distill.teacher and has_scores), "distill.teacher", distill.teacher, both)
    for source in sources if not distill.teacher else ():
        unused = "names scores of documents, which have no effect without distill.what; set distill.what=scores or kl"
        source.require(not (is_vectors and source.score_columns), "label", unused)
        documents = len(source.columns) - 1
        per_document = f"must name {documents} columns, the score of each document, because distill.teacher is empty"
        source.require(is_vectors or len(source.score_columns) == documents, "label", per_document)

"""The model card of a run: the README.md that the Hugging Face hub shows."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from bertjax.config.defaults import fine_tuning_config, pretraining_config
from bertjax.config.limits import value_of
from bertjax.config.lists import corpus_sources
from bertjax.config.model_config import dropout_fields
from bertjax.config.stages import stages_of
from bertjax.interop import cross_encoder, hub, huggingface, sentence_transformers
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.heads import count_parameters
from bertjax.objectives.parsing import objective_weights

PIPELINE = """
from transformers import pipeline

use = pipeline("{purpose}", model="{name}"{code})
use("{text}")
"""
PAIR = """use({{"text": "A fine day.", "text_pair": "The sun shines."}})  # if the model was trained on pairs
"""
# transformers no longer has a pipeline for question answering.
ANSWERS = """
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer, model = (cls.from_pretrained("{name}") for cls in (AutoTokenizer, AutoModelForQuestionAnswering))
inputs = tokenizer("Who lives in Rome?", "Anna lives in Rome.", return_tensors="pt")
outputs = model(**inputs)
answer = slice(outputs.start_logits.argmax(), outputs.end_logits.argmax() + 1)
tokenizer.decode(inputs["input_ids"][0][answer])
"""
# transformers has no pipeline for multiple choice.
CHOICE = """
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer, model = (cls.from_pretrained("{name}") for cls in (AutoTokenizer, AutoModelForMultipleChoice))
endings = ["She reads it.", "She flies."]
inputs = tokenizer(["Anna opens a book."] * len(endings), endings, padding=True, return_tensors="pt")
endings[model(**{{name: x[None] for name, x in inputs.items()}}).logits.argmax()]
"""
EMBEDDINGS_USE = """
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
queries = model.encode_query(["Who lives in Rome?"])
documents = model.encode_document(["Anna lives in Rome.", "The sun shines."])
model.similarity(queries, documents)
"""
RERANKING_USE = """
from sentence_transformers import CrossEncoder

model = CrossEncoder("{name}")
model.rank("Who lives in Rome?", ["The sun shines.", "Anna lives in Rome."], return_documents=True)
model.predict([("Who lives in Rome?", "Anna lives in Rome.")])  # higher scores are more relevant
"""
MASKED = "The man went to the {mask} to buy milk."
# {suffix of a class of transformers: (name of the use on the hub, code, input)}.
USES = {
    "ForPreTraining": ("fill-mask", PIPELINE, MASKED),
    "ForMaskedLM": ("fill-mask", PIPELINE, MASKED),
    "ForSequenceClassification": ("text-classification", PIPELINE + PAIR, "A fine day."),
    "ForTokenClassification": ("token-classification", PIPELINE, "Anna lives in Rome."),
    "ForQuestionAnswering": ("question-answering", ANSWERS, ""),
    "ForMultipleChoice": ("multiple-choice", CHOICE, ""),
    "Model": ("feature-extraction", PIPELINE, "A fine day."),
    sentence_transformers.ARCHITECTURE: ("sentence-similarity", EMBEDDINGS_USE, ""),
    sentence_transformers.CROSS_ENCODER: ("text-ranking", RERANKING_USE, ""),
}
SENTENCE_TRANSFORMERS = "sentence-transformers"
# An absolute path, or a path that begins with ~, . or .., without the last name. Cards are public and omit folders.
FOLDERS = re.compile(r"(?<![\w:/.~-])(?:~|\.{1,2})?/(?:[^\s,=|'\"()\[\]]*/)?(?=[^\s/])")
RECIPE = ("seed", "batch_size", "packing", "epochs", "max_seq_length", "dtype", "init_checkpoint")
OPTIMIZER = ("name", "options", "learning_rate", "schedule", "warmup_steps", "warmup_proportion", "weight_decay",
             "max_grad_norm")  # fmt: skip
ADAM = ("beta1", "beta2", "epsilon", "bias_correction")


# Counts of the manifest, and fields of `data` that a card contains if they are set.
COUNTS = ("documents", "characters")
PREPARATION = ("next_sentence", "masking", "masked_lm_prob", "masked_lm_split", "dupe_factor", "heldout_fraction")
PREPARATION_IF_SET = ("mixture", "do_whole_word_mask", "do_span_mask")
# Fields and sections of fine-tuning that a card contains if they differ from the defaults.
LAYERS, SECTIONS = ("keep_layers", "freeze_layers"), ("head", "lora", "distill")
POOLING = {"cls": "the state of its first token", "last": "that of its last token", "mean": "the mean of its states"}


def model_card(
    source: Pretrained,
    settings: ConfigDict,
    to: str,
    architecture: str,
    manifest: Mapping[str, Any] | None,
    name: str,
    license_name: str,
    part: str = "",
) -> str:
    """Returns the card, in Markdown with the metadata at the top.

    Args:
      source: the model.
      settings: the config of the run.
      to: the format of the folder, huggingface or sentence-transformers.
      architecture: the class of transformers in the folder; the class of the encoder for sentence-transformers.
      manifest: the manifest of the records of pre-training; None if they no longer exist.
      name: the name of the model, or of its folder.
      license_name: an identifier, such as apache-2.0.
      part: the name of a model that the run has trained jointly; "" for the model of the run.
    """
    model, params, is_pretrained = source.config, source.params, settings.task == "pretraining"
    layout = families.huggingface_of(model)
    model_name, kind = huggingface.split_class(architecture, layout)
    scores: Mapping[str, float | None] = source.scores | source.decided
    if kind == "Model" and to == "huggingface":
        scores = {}
    is_classifier = kind == "ForSequenceClassification"
    is_reranker = is_classifier and (to == SENTENCE_TRANSFORMERS or settings.task == cross_encoder.RERANK)
    if has_embeddings := to == SENTENCE_TRANSFORMERS and not is_classifier:
        kind, tags = sentence_transformers.ARCHITECTURE, [to, "feature-extraction", "sentence-similarity"]
        written = {name: params[name] for name in ("bert", "projection") if name in params}
    else:
        to, tags, written = "transformers", [], layout.to_tensors(params, model, architecture)[0]
    if is_reranker:
        kind, to = sentence_transformers.CROSS_ENCODER, SENTENCE_TRANSFORMERS
        tags = [to, "cross-encoder", "reranker"]
    purpose, code, text = USES.get(kind, ("", "", ""))
    mask = _mask(source)
    if text == MASKED and not mask:
        purpose = ""
    metadata = {
        "license": license_name,
        "library_name": to,
        "tags": [layout.to_fields(model)["model_type"], "bertjax", *tags],
        "pipeline_tag": purpose,
        "base_model": base.name if (base := hub.repository(settings.get("init_checkpoint", ""))) else "",
        "language": settings.data.language if is_pretrained else "",
    }
    is_encoder = kind == "Model"  # without the heads
    done = f"{'trained' if is_encoder else 'fine-tuned'} for the task `{settings.task}`"
    done = "pre-trained" if is_pretrained else done
    done = f"the encoder of a model that was {done}" if is_encoder else done
    lines = [
        "---",
        *(f"{field}: {json.dumps(value)}" for field, value in metadata.items() if value != ""),  # JSON is YAML
        "---",
        "",
        f"# {name}",
        "",
        f"{model_name} of {model.num_hidden_layers} layers of {model.hidden_size} with "
        f"{count_parameters(written, model):,} parameters, {done} with bertjax"
        f"{f' as the {part} of another' if part else ''}.",
    ]
    if purpose:
        trust = ", trust_remote_code=True" if layout.needs_code else ""
        code = code.strip().format(purpose=purpose, name=name, text=text.format(mask=mask), code=trust)
        lines += ["", "## Use", "", "```python", code, "```"]
    if has_embeddings:
        lines += _describe_embeddings(settings, model.hidden_size)
    lines += ["", "## Data", "", *_table(_data(settings, manifest))]
    lines += ["", "## Recipe", "", *_table(_recipe(settings, source.step))]
    if scores:
        title = "held-out data" if is_pretrained else "the dev set"
        numbers = {score: "" if value is None else f"{value:.4g}" for score, value in scores.items()}
        lines += ["", f"## Scores on {title}", "", *_table(numbers)]
    lines += ["", "## Intended uses and limits", "", "To be written: intended uses, limits, known biases."]
    return "\n".join(lines) + "\n"


def _mask(source: Pretrained) -> str:
    """Returns the token [MASK] of a masked language model; "" for other models."""
    if not source.predicts_words or families.family_of(source.config).lm_type(source.config) != "masked":
        return ""
    return source.tokenizer.pieces[source.tokenizer.mask_id] if source.tokenizer else "[MASK]"


def _describe_embeddings(settings: ConfigDict, hidden_size: int) -> list[str]:
    """Returns lines about the computation of embeddings, and about the dimensions of truncated embeddings."""
    head = settings.head
    steps = [POOLING[head.pooling]]
    steps += [f"a dense layer ({head.dense_act})"] if head.dense else []
    steps += ["divided by its length"] if head.normalize else []
    width = head.dense or hidden_size
    if head.get("truncate_dim", width) < width:
        width = head.truncate_dim
        steps.append(f"of which the first {width} numbers are left")
    lines = ["", f"The vector of a text has {width} numbers: {', '.join(steps)}."]
    if widths := settings.get("loss", {}).get("widths"):
        lines += [f"It was trained so that its first {widths} numbers are a vector as well (`truncate_dim=`)."]
    return lines


def _data(settings: ConfigDict, manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the rows of the table of the data."""
    data = settings.data
    if settings.task != "pretraining":
        sets = (data.get("sets") or {}).items()
        path = shown_name(data.get("path") or "") or "not from a file"
        return {"data": path} | {f"data, {name}": shown_name(entry.path) for name, entry in sets}
    recipe, counts = (manifest["recipe"], manifest.get("corpus") or {}) if manifest else ({}, {})
    sources = recipe.get("corpus") or corpus_sources(settings)
    sources = sources if isinstance(sources, list | tuple) else [sources]
    rows: dict[str, Any] = {"corpus": ", ".join(shown_name(str(path)) for path in sources) or shown_name(data.records)}
    rows |= {f"training {name}": f"{counts[key]:,}" for name in COUNTS if (key := f"train_{name}") in counts}
    rows |= {name: data[name] for name in PREPARATION} | {name: data[name] for name in PREPARATION_IF_SET if data[name]}
    if "mixture" in rows:  # {source: weight}, or the text of a file
        rows["mixture"] = re.sub(r"[^,=]*/", "", str(rows["mixture"]))
    return rows | _changed("cleaning", data.cleaning, pretraining_config().data.cleaning)


def _selected(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the fields `names` of a section, without missing and empty ones."""
    return {name: values[name] for name in names if values.get(name, "") != ""}


def _changed(section: str, values: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a section that differ from the defaults."""
    return {f"{section}.{field}": value for field, value in values.items() if value != default.get(field)}


def _has_teacher(settings: ConfigDict) -> bool:
    """Returns whether a run was trained on the targets of a teacher, or on scores in its data."""
    distill = settings.get("distill", {})
    return bool(distill.get("teacher")) or distill.get("what", "vectors") != "vectors"


def _recipe(settings: ConfigDict, step: int) -> dict[str, Any]:
    """Returns the rows of the table of the recipe. `step` is the step of the checkpoint; 0 for the last step."""
    is_pretrained = settings.task == "pretraining"
    rows: dict[str, Any] = {}
    if is_pretrained:
        weights = objective_weights(settings).items()
        rows["objective"] = " + ".join(name if weight == 1 else f"{weight:g}*{name}" for name, weight in weights)
        for name, fields in settings.get("objectives", {}).items():
            rows |= {f"{name}.{field}": value for field, value in fields.items()}
    rows |= _selected(settings, RECIPE)
    for stage in stages_of(settings) if "stages" in settings else ():
        done = min(max(step - stage.first_step, 0), stage.steps) if step else stage.steps
        changes = ", ".join(f"{name} = {x}" for name, x in stage.changes.items() if x != value_of(settings, name))
        title = f"steps of length {stage.length}" + (f" with {changes}" if changes else "")
        title = f"{title} ({stage.name})" if title in rows else title
        rows[title] = f"{done:,} of {stage.steps:,}" if done < stage.steps else f"{done:,}"
    if step and "stages" not in settings:
        rows["steps"] = f"{step:,}"
    if not is_pretrained:
        default = fine_tuning_config(settings.task)
        rows |= {name: settings[name] for name in LAYERS if settings.get(name)}
        for section in SECTIONS:
            if section != "distill" or _has_teacher(settings):
                rows |= _changed(section, settings.get(section, {}), default[section])
    # Temperatures of 0 have the value of distill.temperature.
    rows = {name: value for name, value in rows.items() if not (name.endswith("_temperature") and value == 0)}
    rows |= {name: settings.model[name] for name in dropout_fields(settings.model)}
    loss = settings.get("loss", {})
    hidden = () if "triplet" in loss.get("name", "") else ("distance_metric", "triplet_margin")
    rows |= {f"loss.{name}": value for name, value in loss.items() if value not in ("", False) and name not in hidden}
    for name in rows.keys() & {"init_checkpoint", "distill.teacher", "loss.guide"}:
        rows[name] = shown_name(rows[name])
    names = (*OPTIMIZER, *(ADAM if settings.optimizer.name in ("adam", "lamb") else ()))
    return rows | {f"optimizer.{name}": value for name, value in _selected(settings.optimizer, names).items()}


def shown_name(path: str) -> str:
    """Returns the last name of a path, because folders are private; the whole name for a model on the hub."""
    if hub.repository(path) or path.startswith(("http://", "https://")):
        return path
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _table(values: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    cells = ((FOLDERS.sub("", name), FOLDERS.sub("", str(value)).replace("|", "\\|")) for name, value in values.items())
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)]

"""The model card of a run: the README.md that Hugging Face shows beside `model.safetensors`."""

import json
import re
from collections.abc import Mapping

import ml_collections

from bertjax.config.defaults import fine_tuning_config, pretraining_config
from bertjax.config.limits import value_of
from bertjax.config.lists import corpus_sources
from bertjax.config.model_config import BertConfig, dropout_fields
from bertjax.config.stages import stages_of
from bertjax.interop import hub, huggingface, sentence_transformers
from bertjax.models import families
from bertjax.objectives.parsing import weights_of

PIPELINE = """
from transformers import pipeline

use = pipeline("{purpose}", model="{name}")
use("{text}")
"""
PAIR = """use({{"text": "A fine day.", "text_pair": "The sun shines."}})  # if it was trained on pairs
"""
# transformers has no pipeline for question answering any more.
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
VECTORS = """
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
queries = model.encode_query(["Who lives in Rome?"])
documents = model.encode_document(["Anna lives in Rome.", "The sun shines."])
model.similarity(queries, documents)
"""
MASKED = "The man went to the {mask} to buy milk."
# By class of transformers, without its family: what it is for, as the hub calls it; how it is used; an input.
USES = {
    "ForPreTraining": ("fill-mask", PIPELINE, MASKED),
    "ForMaskedLM": ("fill-mask", PIPELINE, MASKED),
    "ForSequenceClassification": ("text-classification", PIPELINE + PAIR, "A fine day."),
    "ForTokenClassification": ("token-classification", PIPELINE, "Anna lives in Rome."),
    "ForQuestionAnswering": ("question-answering", ANSWERS, ""),
    "ForMultipleChoice": ("multiple-choice", CHOICE, ""),
    "Model": ("feature-extraction", PIPELINE, "A fine day."),
    sentence_transformers.ARCHITECTURE: ("sentence-similarity", VECTORS, ""),
}
# A path from the root, from a user's folder or from a folder above, without its last name. Cards are published.
FOLDERS = re.compile(r"(?<![\w:/.~-])(?:~|\.{1,2})?/(?:[^\s,=|'\"()\[\]]*/)?(?=[^\s/])")
RECIPE = ("seed", "batch_size", "packing", "epochs", "max_seq_length", "dtype", "init_checkpoint")
OPTIMIZER = ("name", "options", "learning_rate", "schedule", "warmup_steps", "warmup_proportion", "weight_decay",
             "max_grad_norm")  # fmt: skip
ADAM = ("beta1", "beta2", "epsilon", "bias_correction")


def model_card(
    name: str,
    architecture: str,
    model: BertConfig,
    params: int,
    settings: ml_collections.ConfigDict,
    step: int,
    scores: Mapping[str, float | None],
    manifest: Mapping | None,
    mask: str,
    license_name: str,
    makes_vectors: bool = False,
    part: str = "",
) -> str:
    """Returns the card, in Markdown with the metadata in front.

    Args:
      name: the name of the model, or of its folder.
      architecture: the class of transformers that it is written for.
      params: their number.
      settings: the config of the run.
      step: the checkpoint's step; 0: the run's last step.
      scores: the scores on held-out data, or on the dev set, and the values tuned on it.
      manifest: the manifest of the records that it was pre-trained on, if they are there.
      mask: the mask's piece; empty: it fills none.
      license_name: an identifier, such as apache-2.0.
      makes_vectors: whether it is written for sentence-transformers, with `architecture` as the encoder.
      part: what it is of the run, if not the run's own model, see `conversion.convert`.
    """
    is_pretrained = settings.task == "pretraining"
    layout = families.huggingface_of(model)
    of_family, kind = huggingface.split_class(architecture, layout)
    library, tags = "transformers", []
    if makes_vectors:
        kind, library = sentence_transformers.ARCHITECTURE, "sentence-transformers"
        tags = [library, "feature-extraction", "sentence-similarity"]
    purpose, code, text = USES.get(kind, ("", "", ""))
    if text == MASKED and not mask:
        purpose = ""
    metadata = {"license": license_name, "library_name": library, "tags": [of_family.lower(), "bertjax", *tags]}
    if purpose:
        metadata["pipeline_tag"] = purpose
    if base := hub.repository(settings.get("init_checkpoint", "")):
        metadata["base_model"] = base.name
    if is_pretrained:
        metadata["language"] = settings.data.language
    done = "pre-trained" if is_pretrained else f"fine-tuned for the task `{settings.task}`"
    if kind == "Model":  # without the heads
        done = f"the encoder of a model that was {done if is_pretrained else f'trained for the task `{settings.task}`'}"
    lines = [
        "---",
        *(f"{field}: {json.dumps(value)}" for field, value in metadata.items()),  # JSON is YAML
        "---",
        "",
        f"# {name}",
        "",
        f"{of_family} of {model.num_hidden_layers} layers of {model.hidden_size} with {params:,} parameters, {done} "
        f"with bertjax{f' as the {part} of another' if part else ''}.",
    ]
    if purpose:
        code = code.strip().format(purpose=purpose, name=name, text=text.format(mask=mask))
        lines += ["", "## Use", "", "```python", code, "```"]
    if makes_vectors:
        lines += _vectors(settings, model)
    lines += [
        "",
        "## Data",
        "",
        *_table(_data(settings, manifest)),
        "",
        "## Recipe",
        "",
        *_table(_recipe(settings, step)),
    ]
    if scores:
        title = "held-out data" if is_pretrained else "the dev set"
        numbers = {score: "" if value is None else f"{value:.4g}" for score, value in scores.items()}
        lines += ["", f"## Scores on {title}", "", *_table(numbers)]
    lines += ["", "## What it is for, and what it is not", "", "To be written: intended uses, limits, known biases."]
    return "\n".join(lines) + "\n"


def _vectors(settings, model: BertConfig) -> list[str]:
    """Says what a vector is, and which of its first numbers are one as well."""
    head = settings.head
    states = {"cls": "the state of its first token", "last": "that of its last token", "mean": "the mean of its states"}
    parts = [states[head.pooling], *[f"a dense layer ({head.dense_act})"] * bool(head.dense)]
    parts += ["divided by its length"] * head.normalize
    width = head.dense or model.hidden_size
    if head.get("truncate_dim", width) < width:
        parts, width = [*parts, f"of which the first {head.truncate_dim} numbers are left"], head.truncate_dim
    lines = ["", f"The vector of a text has {width} numbers: {', '.join(parts)}."]
    if widths := settings.get("loss", {}).get("widths"):
        lines += [f"It was trained so that its first {widths} numbers are a vector as well (`truncate_dim=`)."]
    return lines


_COUNTS = ("documents", "characters")
_IF_SET = ("mixture", "do_whole_word_mask", "do_span_mask")


def _data(settings, manifest: Mapping | None) -> dict:
    if settings.task != "pretraining":
        own = {"data": name_of(settings.data.get("path") or "") or "not from a file"}
        sets = settings.data.get("sets") or {}
        return own | {f"data, {name}": name_of(given.path) for name, given in sets.items()}
    recipe, counts = (manifest["recipe"], manifest.get("corpus") or {}) if manifest else ({}, {})
    sources = recipe.get("corpus") or corpus_sources(settings)
    sources = sources if isinstance(sources, list | tuple) else [sources]
    found = {"corpus": ", ".join(name_of(str(source)) for source in sources) or name_of(settings.data.records)}
    found |= {f"training {name}": f"{counts[key]:,}" for name in _COUNTS if (key := f"train_{name}") in counts}
    names = ("next_sentence", "masking", "masked_lm_prob", "masked_lm_split", "dupe_factor", "heldout_fraction")
    found |= {name: settings.data[name] for name in names}
    found |= {name: settings.data[name] for name in _IF_SET if settings.data[name]} | _cleaning(settings)
    if "mixture" in found:  # {source: weight}, or a file's text
        found["mixture"] = re.sub(r"[^,=]*/", "", str(found["mixture"]))
    return found


def _cleaning(settings) -> dict:
    """What was left out of the corpus, as far as it is not the default."""
    return _changed("cleaning", settings.data.cleaning, pretraining_config().data.cleaning)


def _changed(name: str, values: Mapping, default: Mapping) -> dict:
    """The fields of a part of a config that are not the default."""
    return {f"{name}.{field}": value for field, value in values.items() if value != default.get(field)}


# The fields and sections of fine-tuning that a card names where they are not the defaults.
_LAYERS, _PARTS = ("keep_layers", "freeze_layers"), ("head", "lora", "distill")


def _learnt(settings) -> dict:
    """What is learnt, with its weights and settings."""
    weights = weights_of(settings)
    found = {"objective": " + ".join(name if x == 1 else f"{x:g}*{name}" for name, x in weights.items())}
    of_all = settings.get("objectives", {}).items()
    return found | {f"{name}.{field}": value for name, its in of_all for field, value in its.items()}


def _recipe(settings, step: int) -> dict:
    found = _learnt(settings) if settings.task == "pretraining" else {}
    found |= {name: settings[name] for name in RECIPE if name in settings and settings[name] != ""}
    found |= {"init_checkpoint": name_of(settings.init_checkpoint)} if "init_checkpoint" in found else {}
    for stage in stages_of(settings) if "stages" in settings else ():
        done = min(max(step - stage.first_step, 0), stage.steps) if step else stage.steps
        of_all = f" of {stage.steps:,}" if done < stage.steps else ""
        own = [f"{name} = {x}" for name, x in stage.changes.items() if x != value_of(settings, name)]
        title = " with ".join([f"steps of length {stage.length}", *filter(None, [", ".join(own)])])
        found[f"{title} ({stage.name})" if title in found else title] = f"{done:,}{of_all}"
    if step and "stages" not in settings:
        found["steps"] = f"{step:,}"
    if settings.task != "pretraining":
        default = fine_tuning_config(settings.task)
        found |= {name: settings[name] for name in _LAYERS if settings.get(name)}
        for part in _PARTS:
            if part != "distill" or settings.get("distill", {}).get("teacher"):
                found |= _changed(part, settings.get(part, {}), default[part])
        if "distill.teacher" in found:
            found["distill.teacher"] = name_of(found["distill.teacher"])
    found |= {name: settings.model[name] for name in dropout_fields(settings.model)}
    found |= {f"loss.{name}": value for name, value in settings.get("loss", {}).items() if value not in ("", False)}
    names = (*OPTIMIZER, *(ADAM if settings.optimizer.name in ("adam", "lamb") else ()))
    given = {name: settings.optimizer[name] for name in names if settings.optimizer.get(name, "") != ""}
    return found | {f"optimizer.{name}": value for name, value in given.items()}


def name_of(path: str) -> str:
    """Returns the last name of a path, since the folders are of this machine; the whole of a name on the hub."""
    if hub.repository(path) or path.startswith(("http://", "https://")):
        return path
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _table(values: Mapping) -> list[str]:
    cells = ((FOLDERS.sub("", name), FOLDERS.sub("", str(value)).replace("|", "\\|")) for name, value in values.items())
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)]

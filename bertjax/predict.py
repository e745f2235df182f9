"""Uses a checkpoint: python -m bertjax.predict --checkpoint=PATH "the man went to the [MASK]"

Prints the likeliest words for each [MASK] of each text, with probabilities. What was fine-tuned prints a JSON object
for each text: its label, its tags, the answer or the choice; the parts of a text have " ||| " between them. With
--features it writes the hidden states of the texts to a file instead. PATH is a run's workdir, a Hugging Face folder,
or Google's bert_model.ckpt.
"""

import json

from absl import flags

from bertjax import command

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run's workdir, a Hugging Face folder, or a bert_model.ckpt.")
_INPUT = flags.DEFINE_string(
    "input", None, "File with a text a line, besides those on the command line; with --glue the test set's .tsv."
)
_GLUE = flags.DEFINE_bool("glue", False, "Write GLUE's submission for the test set --input to the file --output.")
_JSON = flags.DEFINE_bool("json", False, "One JSON object a line: text, and masks with their words.")
_TOP_K = flags.DEFINE_integer("top_k", 5, "Words for each mask.", lower_bound=1)
_FEATURES = flags.DEFINE_enum(
    "features",
    None,
    ["last", "second_to_last", "sum_last_four", "concat_last_four", "sum_all"],
    "Which hidden states to write to --output: `hidden` [texts, length, width], `mask` [texts, length].",
)
_OUTPUT = flags.DEFINE_string("output", None, "For --features the .npz file, for --glue the .tsv.")
flags.mark_flag_as_required("checkpoint")

# What a text has to be for each class of transformers: the number of its parts, in words.
FORMS = {
    "BertForSequenceClassification": ((1, 2), 'texts, or pairs as "A ||| B"'),
    "BertForTokenClassification": ((1,), "texts, with blanks between words"),
    "BertForFeatureBasedTagging": ((1,), "texts, with blanks between words"),
    "BertForQuestionAnswering": ((2,), '"question ||| paragraph"'),
    "BertForMultipleChoice": (range(3, 100), '"sentence ||| ending ||| ending ..."'),
}


def main(texts: list[str]) -> None:
    from bertjax.config import UserError

    if bool(_FEATURES.value or _GLUE.value) != bool(_OUTPUT.value):
        raise UserError("--output belongs to --features (the .npz file) or to --glue (the .tsv)")
    command.keep_compiled()
    if _GLUE.value:
        write_submission()
        return
    lines = read_lines(_INPUT.value) if _INPUT.value else []
    # Hidden states are found by the number of their line, also those of empty lines.
    texts = texts + [line for line in lines if line.strip() or _FEATURES.value]
    if not texts:
        raise UserError('no text: give one on the command line ("the [MASK] barked") or a file with --input')

    from bertjax.interop import pretrained

    source = pretrained.read(_CHECKPOINT.value)
    if source.tokenizer is None:
        raise UserError(f"{source.path}: no tokenizer beside the checkpoint; put its vocab.txt there")
    if _FEATURES.value:
        write_features(source, texts)
    elif source.architecture in FORMS:
        use_output_layer(source, texts)
    else:
        fill_masks(source, texts)


def read_lines(name: str) -> list[str]:
    from etils import epath

    from bertjax.config import UserError

    path = epath.Path(name)
    if not path.is_file():
        raise UserError(f"--input: no file {name!r}")
    try:
        return path.read_text().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--input: {name} is not UTF-8 ({error.reason} at byte {error.start})") from None


def fill_masks(source, texts: list[str]) -> None:
    import jax

    from bertjax.config import UserError
    from bertjax.model.bert import BertForPreTraining
    from bertjax.tasks import fill_mask

    if "masked_lm" not in source.params:
        raise UserError(f"{source.path}: has no masked-LM head to fill a [MASK] with; --features gives hidden states")
    model, params = BertForPreTraining(source.config), jax.device_put(source.params)  # once, not with every text
    for filled in fill_mask.fill_masks(model, params, source.tokenizer, texts, _TOP_K.value):
        if _JSON.value:
            masks = [[{"word": word, "probability": p} for word, p in words] for words in filled.masks]
            print(json.dumps({"text": filled.text, "masks": masks}, ensure_ascii=False), flush=True)
        else:
            print(fill_mask.describe(filled), flush=True)


def use_output_layer(source, texts: list[str]) -> None:
    """Prints a JSON object for each text, by what the checkpoint was fine-tuned for."""
    from bertjax.config import UserError
    from bertjax.tasks import classification, features, ner, squad, swag
    from bertjax.training import run_folder

    parts = [text.split(" ||| ") for text in texts]
    size = len(parts[0])
    allowed, form = FORMS[source.architecture]
    for text, part in zip(texts, parts):
        if len(part) != size or size not in allowed or not all(map(str.strip, part)):
            raise UserError(f"{text[:60]!r}: this checkpoint wants {form}, each text alike, and no part of it empty")
    if not {"classifier", "spans"} & source.params.keys():
        raise UserError(f"{source.path}: calls itself a {source.architecture}, but has no weights of an output layer")
    # As it was trained, where that is known; foreign ones as long as they have positions for.
    config = run_folder.read_config(source.path) if source.format == "bertjax" else {}
    longest = config.get("max_seq_length", source.config.max_position_embeddings)
    firsts = [part[0] for part in parts]
    if source.architecture == "BertForTokenClassification":
        results = ner.predict(source, firsts, longest)
    elif source.architecture == features.ARCHITECTURE:
        results = ner.predict(source, firsts, longest, features.tagging)
    elif source.architecture == "BertForQuestionAnswering":
        data = config.get("data", {})
        windows = {name: data[name] for name in ("doc_stride", "max_query_length") if name in data}
        threshold = run_folder.null_threshold(source.path) if source.format == "bertjax" else None
        if threshold is not None:
            windows["null_threshold"] = threshold
        results = squad.predict(source, parts, longest, **windows)
    elif source.architecture == "BertForMultipleChoice":
        results = swag.predict(source, [(part[0], part[1:]) for part in parts], longest)
    else:
        seconds = [part[1] for part in parts] if size == 2 else None
        results = classification.predict(source, firsts, seconds, longest)
    for text, result in zip(texts, results):
        print(json.dumps({"text": text, **result}, ensure_ascii=False), flush=True)


def write_submission() -> None:
    from bertjax.config import UserError
    from bertjax.files import write_whole
    from bertjax.interop import pretrained
    from bertjax.tasks import glue
    from bertjax.training import run_folder

    source = pretrained.read(_CHECKPOINT.value)
    config = run_folder.read_config(source.path) if source.format == "bertjax" else {}
    if config.get("task") != "glue" or not _INPUT.value:
        raise UserError("--glue: needs the workdir of a run on a task of GLUE, and the task's test.tsv as --input")
    content, said = glue.submission(source, config.data.name, _INPUT.value, config.max_seq_length)
    write_whole(_OUTPUT.value, content)
    print(f"{said} in {_OUTPUT.value}", flush=True)


def write_features(source, texts: list[str]) -> None:
    import io

    import jax
    import numpy as np

    from bertjax.files import write_whole
    from bertjax.model.bert import BertModel
    from bertjax.tasks.hidden_states import hidden_states

    model, params = BertModel(source.config), jax.device_put(source.params["bert"])  # once, not with every batch
    hidden, mask, cut = hidden_states(model, params, source.tokenizer, texts, _FEATURES.value)
    content = io.BytesIO()
    np.savez(content, hidden=hidden, mask=mask)
    write_whole(_OUTPUT.value, content.getvalue())
    shape = ", ".join(map(str, hidden.shape))
    said = f"hidden [{shape}] and mask of {len(texts)} texts in {_OUTPUT.value}"
    print(said + (f"; {cut} of them cut to {source.config.max_position_embeddings} tokens" if cut else ""), flush=True)


if __name__ == "__main__":
    command.run(main)

"""Predicts with a checkpoint: python -m bertjax.predict --checkpoint=PATH "the man went to the [MASK]"

With a pre-trained checkpoint, prints the most likely words for each [MASK] of each text, with probabilities. With a
fine-tuned one, prints a JSON object per text: its label, tags, answer or choice. " ||| " separates the parts of a text.
PATH is a run's workdir, a Hugging Face folder, or Google's bert_model.ckpt. From a workdir, uses the best checkpoint
after fine-tuning and the latest after pre-training; PATH@best, PATH@latest or PATH@STEP choose another.
"""

import json

from absl import flags

from bertjax import command

_CHECKPOINT = command.define_checkpoint_flag()
_INPUT = flags.DEFINE_string("input", None, "File with one text per line, in addition to those on the command line.")
_JSON = flags.DEFINE_bool("json", False, "Print filled masks as one JSON object per text: text, masks with words.")
_TOP_K = flags.DEFINE_integer("top_k", 5, "Number of words per mask.", lower_bound=1)
flags.mark_flag_as_required("checkpoint")


def main(texts: list[str]) -> None:
    from bertjax.config import UserError

    command.keep_compiled()
    texts = texts + [line for line in command.read_lines(_INPUT.value) if line.strip()]
    if not texts:
        raise UserError('no text: give one on the command line ("the [MASK] barked") or a file with --input')

    from bertjax.interop import pretrained
    from bertjax.tasks import of_checkpoint

    source = pretrained.read_with_tokenizer(_CHECKPOINT.value)
    task = of_checkpoint(source.settings.get("task", ""), source.architecture)
    if task is None:
        fill_masks(source, texts)
        return
    parts = task.inputs.split(texts)
    if not source.params.keys() - {"bert", "masked_lm", "next_sentence"}:
        raise UserError(
            f"{source.path}: its architecture is {source.architecture}, but it has no weights for the output layer"
        )
    for text, result in zip(texts, task.predict(source, parts)):
        print(json.dumps({"text": text, **result}, ensure_ascii=False), flush=True)


def fill_masks(source, texts: list[str]) -> None:
    import jax

    from bertjax.config import UserError
    from bertjax.model.bert import BertForMaskedLM
    from bertjax.tasks import fill_mask

    if "masked_lm" not in source.params:
        raise UserError(f"{source.path}: no masked-LM head to fill a [MASK]; bertjax.extract writes hidden states")
    model, params = BertForMaskedLM(source.config), jax.device_put(source.params)  # once, not per text
    for filled in fill_mask.fill_masks(model, params, source.tokenizer, texts, _TOP_K.value):
        if _JSON.value:
            masks = [[{"word": word, "probability": p} for word, p in words] for words in filled.masks]
            print(json.dumps({"text": filled.text, "masks": masks}, ensure_ascii=False), flush=True)
        else:
            print(fill_mask.describe(filled), flush=True)


if __name__ == "__main__":
    command.run(main)

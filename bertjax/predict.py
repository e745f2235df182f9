"""Fills masks: python -m bertjax.predict --checkpoint=WORKDIR "the man went to the [MASK]"

Prints the likeliest words for each [MASK] of each text, with probabilities.
"""

import json

from absl import flags

from bertjax import command

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Workdir of a training run.")
_INPUT = flags.DEFINE_string("input", None, "File with a text a line, besides those on the command line.")
_JSON = flags.DEFINE_bool("json", False, "One JSON object a line: text, and masks with their words.")
_TOP_K = flags.DEFINE_integer("top_k", 5, "Words for each mask.", lower_bound=1)
flags.mark_flag_as_required("checkpoint")


def main(texts: list[str]) -> None:
    from etils import epath

    from bertjax.config import UserError
    from bertjax.training import run_folder

    if _INPUT.value:
        path = epath.Path(_INPUT.value)
        if not path.is_file():
            raise UserError(f"--input: no file {_INPUT.value!r}")
        try:
            texts = texts + [line for line in path.read_text().splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise UserError(f"--input: {_INPUT.value} is not UTF-8 ({error.reason} at byte {error.start})") from None
    if not texts:
        raise UserError('no text: give one on the command line ("the [MASK] barked") or a file with --input')

    config = run_folder.read_config(_CHECKPOINT.value)
    tokenizer = run_folder.load_tokenizer(_CHECKPOINT.value)

    from bertjax.tasks import fill_mask

    model, params = fill_mask.load(_CHECKPOINT.value, config)
    for filled in fill_mask.fill_masks(model, params, tokenizer, texts, _TOP_K.value):
        if _JSON.value:
            masks = [[{"word": word, "probability": p} for word, p in words] for words in filled.masks]
            print(json.dumps({"text": filled.text, "masks": masks}, ensure_ascii=False), flush=True)
        else:
            print(fill_mask.describe(filled), flush=True)


if __name__ == "__main__":
    command.run(main)

"""Extracts hidden states: python -m bertjax.extract --checkpoint=PATH --layers=concat_last_four --input=TEXTS.txt \\
--output=FILE.npz

Writes `hidden` [texts, length, width] and `mask` [texts, length]: 1 for tokens, 0 for padding. PATH is any checkpoint
that bertjax.predict takes.
"""

import io

from absl import flags

from bertjax import command

_CHECKPOINT = command.define_checkpoint_flag()
_INPUT = flags.DEFINE_string("input", None, "File with one text per line, in addition to those on the command line.")
_LAYERS = flags.DEFINE_string(
    "layers", "concat_last_four", "Which hidden states to write; the error for an unknown name lists them."
)
_OUTPUT = flags.DEFINE_string("output", None, "The .npz file to write.")
flags.mark_flags_as_required(["checkpoint", "output"])


def main(texts: list[str]) -> None:
    from bertjax.config import UserError
    from bertjax.model.hidden_states import WITHOUT_WEIGHTS, check_layers

    if _LAYERS.value not in WITHOUT_WEIGHTS:
        raise UserError(f"--layers={_LAYERS.value}: choose one of {', '.join(WITHOUT_WEIGHTS)}")
    texts = texts + command.read_lines(_INPUT.value)  # also empty lines: row i of the output is line i of the input
    if not texts:
        raise UserError("no text: give one on the command line or a file with --input")

    import jax
    import numpy as np

    from bertjax.files import write_whole
    from bertjax.interop import pretrained
    from bertjax.model.bert import BertModel
    from bertjax.tasks.extraction import extract

    command.keep_compiled()
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value)
    check_layers(_LAYERS.value, source.config, "--layers")
    model, params = BertModel(source.config), jax.device_put(source.params["bert"])  # once, not per batch
    hidden, mask, cut = extract(model, params, source.tokenizer, texts, _LAYERS.value)
    content = io.BytesIO()
    np.savez(content, hidden=hidden, mask=mask)
    write_whole(_OUTPUT.value, content.getvalue())
    note = f"; {cut} of them truncated to {source.config.max_position_embeddings} tokens" if cut else ""
    shape = ", ".join(map(str, hidden.shape))
    print(f"hidden [{shape}] and mask of {len(texts)} texts in {_OUTPUT.value}{note}", flush=True)


if __name__ == "__main__":
    command.run(main)

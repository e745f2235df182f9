"""Extracts hidden states: python -m bertjax.extract --checkpoint=PATH --layers=concat_last_four --input=TEXTS.txt \\
--output=FILE.npz

Writes `hidden` [tokens of all texts, width] and `offsets` [texts + 1]: text i, with its [CLS] and [SEP], has the rows
from offsets[i] to offsets[i + 1]. --pool=mean writes one vector a text instead, `vectors` [texts, width]: the mean of
all its tokens, also [CLS] and [SEP]; --pool=cls that of [CLS]. PATH is any checkpoint that bertjax.predict takes.
"""

from collections.abc import Iterator

from absl import flags

from bertjax import command

_CHECKPOINT = command.define_checkpoint_flag()
_DTYPE = command.define_dtype_flag()
_INPUT = flags.DEFINE_string("input", None, "File with one text per line, in addition to those on the command line.")
_LAYERS = flags.DEFINE_string(
    "layers", "concat_last_four", "Which hidden states to write; the error for an unknown name lists them."
)
_POOL = flags.DEFINE_enum("pool", None, ["mean", "cls"], "Write one vector a text: the mean of its tokens, or [CLS].")
_OUTPUT = flags.DEFINE_string("output", None, "The .npz file to write.")
flags.mark_flags_as_required(["checkpoint", "output"])


def main(texts: list[str]) -> None:
    from bertjax.config import UserError
    from bertjax.model.layer_choice import WITHOUT_WEIGHTS, check_layers

    if _LAYERS.value not in WITHOUT_WEIGHTS:
        raise UserError(f"--layers={_LAYERS.value}: choose one of {', '.join(WITHOUT_WEIGHTS)}")

    def all_texts() -> Iterator[str]:
        yield from texts
        yield from command.lines(_INPUT.value)  # also empty ones: text i of the output is line i of the input

    if next(all_texts(), None) is None:
        raise UserError("no text: give one on the command line or a file with --input")

    import jax

    from bertjax import families
    from bertjax.interop import pretrained
    from bertjax.sharding.mesh import compute_for
    from bertjax.tasks import hidden_states

    command.keep_compiled()
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value, _DTYPE.value)
    check_layers(_LAYERS.value, source.config, "--layers")
    model = families.of(source.config).model(source.config, compute_for(source.dtype))
    params = jax.device_put(source.params["bert"])  # once, not per batch
    given = (model, params, source.tokenizer, all_texts, _LAYERS.value, _POOL.value or "")
    written = hidden_states.write(_OUTPUT.value, *given)
    note = f"; {written.cut} of them cut to {source.config.max_position_embeddings} tokens" if written.cut else ""
    shape = ", ".join(map(str, written.shape))
    print(f"{written.name} [{shape}] of {written.texts} texts in {_OUTPUT.value}{note}", flush=True)


if __name__ == "__main__":
    command.run(main)

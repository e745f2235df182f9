"""Evaluates a checkpoint on minimal pairs: python -m bertjax.evaluate --checkpoint=PATH --pairs=blimp.jsonl.xz

Each line of the file is an object with a `good` and a `bad` sentence and perhaps its `paradigm` and `phenomenon`, as in
BLiMP (Warstadt et al. 2020), whose own files are read as well. Prints the share of pairs whose good sentence has the
higher likelihood; of a model that fills masks, this is the pseudo-log-likelihood. Chance is 50 %. PATH is any
checkpoint that bertjax.predict takes.
"""

import json

from absl import flags

from bertjax import command

_CHECKPOINT = command.define_checkpoint_flag()
_DTYPE = command.define_dtype_flag()
_PAIRS = flags.DEFINE_string("pairs", None, "The .jsonl file with the pairs; .gz, .xz or .zst may follow.")
_MOST = flags.DEFINE_integer("most", 0, "Only the first so many pairs of each paradigm; 0: all.", lower_bound=0)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object, also with the shares of the paradigms.")
flags.mark_flags_as_required(["checkpoint", "pairs"])


def main(arguments: list[str]) -> None:
    from etils import epath

    from bertjax.config import UserError
    from bertjax.interop import pretrained
    from bertjax.sharding.mesh import compute_for

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; the pairs are given as --pairs=FILE")
    command.keep_compiled()
    if not epath.Path(_PAIRS.value).is_file():
        raise UserError(f"--pairs: no file {_PAIRS.value!r}")

    import jax

    from bertjax.families.with_heads import BertForMaskedLM
    from bertjax.tasks import likelihood

    pairs = likelihood.read_pairs(_PAIRS.value, _MOST.value)
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value, _DTYPE.value)
    if not source.predicts_words:
        raise UserError(source.no_words)
    model = BertForMaskedLM(source.config, compute_for(source.dtype))
    is_right = likelihood.compare(model, jax.device_put(source.params), source.tokenizer, pairs)
    share = sum(is_right) / len(pairs)
    phenomena, paradigms = (likelihood.shares(pairs, is_right, by) for by in ("phenomenon", "paradigm"))
    if _JSON.value:
        by_name = {name: share for name, (share, _) in paradigms.items()}
        print(json.dumps({"share": share, "pairs": len(pairs), "paradigms": by_name}, ensure_ascii=False), flush=True)
        return
    groups = phenomena if len(phenomena) > 1 else paradigms
    for name, (part, count) in sorted(groups.items()) if len(groups) > 1 else ():
        print(f"{name:<44} {part:6.1%} of {count:,}")
    print(f"the good sentence is more likely in {share:.1%} of {len(pairs):,} pairs (chance: 50 %)", flush=True)


if __name__ == "__main__":
    command.run(main)

"""Tables whose rows train for the same time, not the same number of steps: the shared config and the rows' changes.

`python -m experiments.ablations.race` trains and scores the rows. All rows have the model size and the tokens per step
of the short models of `scaled.py`, at `cores` 4 layers of 128 and 8,192 tokens. Sequences are four times as long: 16 of
128. In 32 tokens, four of five pairs would come from different texts, and the objective of pairs would learn nothing.
All rows use packing unless a row disables it, so no row computes padding.
"""

import dataclasses
from collections.abc import Callable, Mapping

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.config.model_config import model_size
from bertjax.models import model_fields
from experiments.ablations.scaled import SCALES, Scale

LONGER = 4  # times the length of the scale's short sequences
WINDOW_BYTES = 48, 96


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
      title: the difference from the previous row, or from the first row.
      records: the name of its records: pairs | sentences | bpe.
      change: (config, scale) -> None. Changes the config of the previous row, or the shared config.
      bits: the column of its bits per byte, which are comparable within a column. Empty: the row predicts no words, and
        has no BLiMP score.
    """

    name: str
    title: str
    records: str
    change: Callable
    bits: str = "bits_per_byte"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Args:
      rows: the rows by name.
      scores: the columns, names in `race.COLUMNS`.
      adds_up: whether a row includes the changes of all previous rows. If True, scores are compared with the previous
        row, else with the first row.
      trains_once: whether the seeds are seeds of fine-tuning, and all runs start from one pre-trained model.
      window_bytes: the bytes of the shortest and the longest text for bits per byte.
    """

    name: str
    rows: Mapping[str, Row]
    scores: tuple[str, ...]
    adds_up: bool
    trains_once: bool = False
    window_bytes: tuple[int, int] = WINDOW_BYTES

    def config(self, which: str):
        """Returns the config of SCALE/ROW/STEPS. Raises `UserError` if the scale or the row does not exist."""
        scale, name, steps = (*which.split("/"), "", "")[:3]
        if scale not in SCALES or name not in self.rows or not steps.isdecimal() or int(steps) < 8:
            known = f"{', '.join(SCALES)} and {', '.join(self.rows)}"
            raise UserError(f"{which!r} is not SCALE/ROW/STEPS with 8 steps or more, of {known}")
        config = _base(SCALES[scale], int(steps)).unlock()
        rows = list(self.rows.values())[: list(self.rows).index(name) + 1]
        for row in rows if self.adds_up else rows[-1:]:
            row.change(config, SCALES[scale])
        return config.lock()


def table(name: str, rows: tuple[Row, ...], scores: tuple[str, ...], **how) -> Table:
    return Table(name, {row.name: row for row in rows}, scores, **how)


def _base(scale: Scale, steps: int):
    """Returns the config that all rows share."""
    config, length = pretraining_config(), length_of(scale)
    config.model.update(model_size(scale.size))
    config.update_from_flattened_dict(scale.pretraining)
    config.stages = named_stages(short=stage(steps, length, most_masked(length, 0.15)))
    config.batch_size //= LONGER
    config.packing = True
    config.data.layout = "compact"
    config.tokenizer.lowercase = False
    config.model.max_position_embeddings = max(128, length)  # for the longest sentences of BLiMP
    config.eval.update(every_steps=steps, fill_masks=())
    config.checkpoint.update(every_steps=1000, keep=1)
    config.update_from_flattened_dict(scale.equal_time)
    config.sinks = ()
    return config


def become(config, family: str, **fields) -> None:
    """Gives the model of a config another family: fields of both families keep their values, except `fields`."""
    shared = set(model_fields(family)) & set(config.model) - {"family"}
    config.model = model_fields(family, **{name: config.model[name] for name in shared} | fields)


def become_rotary(config) -> None:
    """Gives the model ModernBERT's rotary positions and LayerNorm before each layer, but nothing else of ModernBERT."""
    become(
        config,
        "modernbert",
        attention_output_dropout_prob=0.0,
        global_attn_every_n_layers=1,
        global_rope_theta=10_000.0,  # the value in modern.py for short sequences
        glu=False,
        bias=True,
    )


def become_recurrent(config) -> None:
    """Makes the model a Transformer-XL with a memory of a sequence's length, without packing."""
    (only,) = config.stages.values()
    become(config, "transformer_xl", memory_length=only.length)
    config.data.update(stream=True, short_seq_prob=0.0)
    config.packing = False


def length_of(scale: Scale) -> int:
    return LONGER * scale.stages[0][1]


def steps_of(config) -> int:
    return sum(each.steps for each in config.stages.values())


def most_masked(length: int, share: float) -> int:
    return -int(-length * share // 1)

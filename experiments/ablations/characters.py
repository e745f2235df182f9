"""Models of bytes: masked words, next bytes, next bytes with auxiliary losses, and next bytes with a memory.

SCALE/ROW/STEPS, such as cores/auxiliary/3000.

All rows read bytes in sequences of 256 (`cores`). They have 1.5 times the layers of `successors.py`, and its recipe:
Adam with a rate that falls from 2e-3 to 0. The first row is the byte model that fills masks. The next two rows have the
form of characters.py. `python -m experiments.ablations.race --table=characters` trains each row for the same time.

Command:  python -m bertjax.main --config=experiments/ablations/characters.py:cores/auxiliary/3000
              --config.data.corpus=texts/
Hardware: cores: two CPU cores, 6 minutes a row (RESULTS.md)
Paper:    no comparison at equal time; Al-Rfou et al. 2019 remove one loss at a time
"""

from bertjax.config.defaults import named_stages, stage
from bertjax.objectives.parsing import learn
from experiments.ablations.equal_time import Row, become_recurrent, length_of, most_masked, steps_of, table
from experiments.ablations.scaled import Scale

LONGER = 2  # times the length of token sequences, because a word has more bytes than tokens


def _masked(config, scale: Scale) -> None:
    """Sets BERT's form with whole-word masking, as in bytes.py."""
    length = LONGER * length_of(scale)
    config.tokenizer.update(kind="bytes", lowercase=False)
    config.model.update(vocab_size=261, num_hidden_layers=3 * config.model.num_hidden_layers // 2)
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=length)
    config.data.update(next_sentence="none", masking="dynamic", do_whole_word_mask=True, dupe_factor=1)
    config.stages = named_stages(short=stage(steps_of(config), length, most_masked(length, 0.15)))
    config.batch_size //= LONGER
    config.optimizer.update(name="adam", schedule="linear", warmup_steps=steps_of(config) // 8)


def _next(config, scale: Scale) -> None:
    _masked(config, scale)
    config.data.do_whole_word_mask = False
    config.model.update(causal=True, positions="each_layer", output="plain", hidden_act="relu", type_vocab_size=1)


def _auxiliary(config, scale: Scale) -> None:
    _next(config, scale)
    learn(config, "lm + auxiliary", auxiliary=dict(layers_until=0.5, targets=2, target_weight=0.5))


def _recurrent(config, scale: Scale) -> None:
    _masked(config, scale)
    config.data.do_whole_word_mask = False
    become_recurrent(config)


TABLE = table(
    "characters",
    (
        Row("masked", "masked words", "words", _masked, bits="hidden_bits"),
        Row("next", "next bytes", "bytes", _next),
        Row("auxiliary", "next bytes, with auxiliary losses", "bytes", _auxiliary),
        Row("recurrent", "next bytes, with a memory (Transformer-XL)", "stream", _recurrent),
    ),
    scores=("bits_per_byte", "hidden_bits"),
    adds_up=False,
    window_bytes=(160, 250),
)


def get_config(which="cores/auxiliary/3000"):
    return TABLE.config(which)

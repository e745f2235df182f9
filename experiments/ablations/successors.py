"""Objectives after BERT's masked words: left to right, permuted words, with a memory, and replaced words.

SCALE/ROW/STEPS, such as cores/replaced/3000.

All rows have one size, one vocabulary, the same text in full sentences, no dropout, and one recipe: Adam with a rate
that falls from 2e-3 (`gpu`: 5e-4) to 0, as in BERT's row of `today.py`. They differ in the objective and in the form of
the model. Masked and replaced words have two rows with two forms. `python -m experiments.ablations.race
--table=successors` pre-trains each row once, for the same time, and fine-tunes it with three seeds.

The generator of `replaced` has a fourth of the width, as in ELECTRA-small. At `cores`, a fourth would be half a head,
so the generator has half of the width. The steps are slower for this reason, and the run has fewer steps.

Command:  python -m bertjax.main --config=experiments/ablations/successors.py:cores/replaced/3000
              --config.data.corpus=texts/
Hardware: cores: two CPU cores, 60 minutes; gpu: one H200, 3 minutes a row (RESULTS.md)
Paper:    no comparison at equal time of two cores; ELECTRA against BERT at equal compute: Clark et al. 2020,
          figure 2
"""

from bertjax.objectives.parsing import learn
from experiments.ablations.equal_time import Row, become, become_recurrent, become_rotary, steps_of, table
from experiments.ablations.scaled import Scale


def _masked(config, scale: Scale) -> None:
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.data.update(next_sentence="none", masking="dynamic", masked_lm_prob=0.15, dupe_factor=1)
    config.optimizer.update(name="adam", schedule="linear", warmup_steps=steps_of(config) // 8)


def _next(config, scale: Scale) -> None:
    """Sets GPT-2's form, as in gpt.py."""
    _masked(config, scale)
    config.model.update(causal=True, norm="pre", output="plain", layer_norm_eps=1e-5)


def _replaced(config, scale: Scale) -> None:
    """Sets ELECTRA's objective, in BERT's form."""
    _masked(config, scale)
    config.data.masked_lm_split = (0.85, 0.0, 0.15)
    width = max(0.25, 1 / config.model.num_attention_heads)
    learn(config, "50*replaced + generator", generator=dict(width=width))


def _masked_rotary(config, scale: Scale) -> None:
    _masked(config, scale)
    become_rotary(config)


def _replaced_rotary(config, scale: Scale) -> None:
    _replaced(config, scale)
    become_rotary(config)


def _permuted(config, scale: Scale) -> None:
    """Sets XLNet's objective and form, without masks."""
    _masked(config, scale)
    become(config, "xlnet")
    learn(config, "plm", plm=dict(k=6, max_span_words=5))


def _recurrent(config, scale: Scale) -> None:
    """Sets Transformer-XL's form: next words with a memory."""
    _masked(config, scale)
    become_recurrent(config)


TABLE = table(
    "successors",
    (
        Row("masked", "masked words (BERT)", "sentences", _masked, bits="hidden_bits"),
        Row("next", "left to right (GPT-2)", "sentences", _next),
        Row("permuted", "permuted (XLNet)", "sentences", _permuted, bits="hidden_bits"),
        Row("recurrent", "left to right, with a memory (Transformer-XL)", "stream", _recurrent),
        Row("replaced", "replaced words (ELECTRA)", "sentences", _replaced, bits=""),
        Row("masked_rotary", "masked words, rotary, pre-norm", "sentences", _masked_rotary, bits="hidden_bits"),
        Row("replaced_rotary", "replaced words, rotary, pre-norm", "sentences", _replaced_rotary, bits=""),
    ),
    scores=("bits_per_byte", "hidden_bits", "blimp", "conll", "sst2", "mrpc"),
    adds_up=False,
    trains_once=True,
)


def get_config(which="cores/masked/3000"):
    return TABLE.config(which)

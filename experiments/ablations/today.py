"""Methods since BERT: do they pay on two CPU cores? SCALE/ROW/STEPS, such as cores/rotary/3000.

Each row of `TABLE` adds one change to the previous row. `equal_time.py` has the shared config.

The learning rates of `cores`, one for each optimizer, are: AdamW 2e-3; StableAdamW 2e-3, as in modern:cores; Muon 4e-3,
with updates scaled to AdamW's size (Liu et al. 2025, section 2.2). They were chosen in short runs on a small text in
sequences of 32, one run each, and not for each row. Held-out losses of no_dropout in 1,200 steps 5.954 with 1e-3 and
5.508 with 2e-3; glu in 500 steps 6.106 with 1e-3, 5.720 with 2e-3, 5.524 with 4e-3; stable_adamw 5.501 with 2e-3,
5.512 with 4e-3; muon 5.643 with 2e-3, 5.383 with 4e-3, 5.511 with 1e-2.

Command:  python -m bertjax.main --config=experiments/ablations/today.py:cores/all/3000 --config.data.corpus=texts/
Hardware: two CPU cores, 10 minutes
Paper:    no comparison at equal time
"""

from bertjax.config.defaults import named_stages, stage
from experiments.ablations.equal_time import Row, become_rotary, length_of, most_masked, steps_of, table
from experiments.ablations.scaled import Scale

DECAY = 0.25  # share of the steps with a falling rate, as in modern:cores


def _bert(config, scale: Scale) -> None:
    config.model.update(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    # Two copies with different masks, because ten minutes reach the second copy.
    config.data.update(next_sentence="pairs", masking="static", masked_lm_prob=0.15, dupe_factor=2)
    config.optimizer.update(name="adam", schedule="linear", warmup_steps=steps_of(config) // 8)


def _sentences(config, scale: Scale) -> None:
    config.data.update(next_sentence="none", masking="dynamic", masked_lm_prob=0.3, dupe_factor=1)
    for each in config.stages.values():
        each.max_predictions_per_seq = most_masked(each.length, 0.3)


def _no_dropout(config, scale: Scale) -> None:
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def _rotary(config, scale: Scale) -> None:
    become_rotary(config)


def _glu(config, scale: Scale) -> None:
    # Three matrices instead of two, so two thirds of the width, a multiple of eight.
    config.model.update(glu=True, bias=False, intermediate_size=round(config.model.intermediate_size / 12) * 8)


def _stable_adamw(config, scale: Scale) -> None:
    config.optimizer.update(
        name="stable_adamw",
        beta2=0.98,
        weight_decay=3e-4,
        schedule="trapezoid",
        warmup_steps=steps_of(config) // 30,
        decay_proportion=DECAY,
        decay="sqrt",
        decay_to=0.04,
    )


def _muon(config, scale: Scale) -> None:
    config.optimizer.update(name="muon", options="consistent_rms=0.2 adam_b2=0.98")
    config.optimizer.learning_rate *= 2
    # Muon multiplies the decay by the rate. At the peak, the decay of a matrix equals StableAdamW's decay.
    config.optimizer.weight_decay /= config.optimizer.learning_rate


def _all(config, scale: Scale) -> None:
    length, steps = length_of(scale), steps_of(config)
    config.model.update(global_attn_every_n_layers=3, local_attention=length // 2)
    config.tokenizer.kind = "bpe"
    last = round(DECAY * steps)
    config.stages = named_stages(
        constant=stage(steps - last, length, most_masked(length, 0.3)),
        decay=stage(last, length, most_masked(length, 0.15), data=dict(masked_lm_prob=0.15)),
    )


TABLE = table(
    "today",
    (
        Row("bert", "BERT's recipe", "pairs", _bert),
        Row("sentences", "+ no NSP, dynamic masks of 30 %", "sentences", _sentences),
        # A separate row, because ModernBERT has no dropout in most places where BERT has dropout.
        Row("no_dropout", "+ no dropout", "sentences", _no_dropout),
        Row("rotary", "+ rotary positions, pre-norm", "sentences", _rotary),
        Row("glu", "+ GLU, no biases", "sentences", _glu),
        Row("stable_adamw", "+ StableAdamW and its schedule", "sentences", _stable_adamw),
        Row("muon", "+ Muon in its place", "sentences", _muon),
        Row("all", "all: + local windows, BPE, 15 % masked at the end", "bpe", _all),
    ),
    scores=("bits_per_byte", "blimp", "conll", "sst2"),
    adds_up=True,
)


def get_config(which="cores/bert/3000"):
    return TABLE.config(which)

"""ModernBERT (Warner et al. 2024) in its sizes and in Ettin's sizes: base, large, 17m, 32m, 68m, 150m, 400m, 1b; cores.

The stages are Ettin's recipe (Weller et al. 2025), as in its configs for Composer:

pretraining: 1.7 T tokens in sequences of 1,024, 30 % masked, a constant rate after a warm-up, a batch that first grows
context:     250 B tokens in sequences of 7,999, a larger rope base in global layers; the rate falls to
             half by 1 - sqrt
decay:       50 B tokens, 15 % masked, a larger rope base in all layers; the rate falls to 4 % of this half. 1b has a
             third of the tokens of `context` and `decay`

Differences from Ettin: Ettin's batch grows by a microbatch, in up to 192 sizes. Each size compiles the step again, so
the batch grows in 8 sizes here. Ettin does not count padding as tokens. Except for 17m, Ettin's `context` already
has a larger rope base in local layers. The vocabulary is a byte-level BPE, as in Ettin, learned from the corpus.

cores is for two CPU cores and three to six hours. It has the shape of 17m, with fewer tokens and short sequences. In
ten minutes, a smaller model learns more: --config=text --config.budget=10min.

Command:  bertjax train --config=modern:base --config.data.corpus=texts/ --workdir=runs/modern
Hardware: not run at any of these sizes; 232 of the 6,000 steps of cores on two CPU cores, about 2 s per step
Paper:    not comparable: other data and vocabularies
"""

from bertjax.config import named_stages, pretraining_config, stage
from bertjax.models import model_fields

# Layers, hidden size, width of the gated product, heads; peak of the rate, weight decay, tokens of the warm-up, and
# tokens of the growth of the batch.
SIZES = {
    "17m": (7, 256, 384, 4, 3e-3, 3e-4, 4e9, 125e9),
    "32m": (10, 384, 576, 6, 3e-3, 3e-4, 4e9, 100e9),
    "68m": (19, 512, 768, 8, 3e-3, 3e-4, 3e9, 75e9),
    "150m": (22, 768, 1152, 12, 8e-4, 1e-5, 3e9, 50e9),
    "400m": (28, 1024, 2624, 16, 5e-4, 1e-5, 2e9, 10e9),
    "1b": (28, 1792, 3840, 28, 5e-4, 5e-5, 2e9, 3e9),
}
SIZES |= {"base": SIZES["150m"], "large": SIZES["400m"]}
FALLING = dict(schedule="trapezoid", decay_proportion=1.0, decay="sqrt")


def get_config(size="base"):
    layers, hidden, inner, heads, rate, weight_decay, warmup, ramp = SIZES["17m" if size == "cores" else size]
    config = pretraining_config()
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads)
    config.model = model_fields("modernbert", **sizes, global_rope_theta=10_000.0)
    config.tokenizer.update(kind="bpe", lowercase=False)
    config.data.update(next_sentence="none", masking="dynamic", masked_lm_prob=0.3, dupe_factor=1)
    config.packing = True
    config.optimizer.update(name="stable_adamw", learning_rate=rate, schedule="constant", beta2=0.98, epsilon=1e-6)
    config.optimizer.weight_decay = weight_decay
    if size == "cores":
        return for_cores(config)
    config.optimizer.warmup_tokens = warmup
    config.batch_size = 4608
    share = 1 / 3 if size == "1b" else 1.0
    wide, wider = dict(global_rope_theta=160_000.0), dict(global_rope_theta=160_000.0, local_rope_theta=160_000.0)
    config.stages = named_stages(
        pretraining=stage(0, 1024, 308, tokens=1.7e12, ramp_from=576, ramp_tokens=ramp),
        context=stage(0, 7999, 2400, tokens=250e9 * share, model=wide, optimizer=FALLING | dict(decay_to=0.5)),
        decay=stage(
            0, 7999, 2400, tokens=50e9 * share, model=wider, data=dict(masked_lm_prob=0.15),
            optimizer=FALLING | dict(learning_rate=rate / 2, decay_to=0.04),
        ),
    )  # fmt: skip
    return config


def for_cores(config):
    config.model.vocab_size = 8000
    config.stages = named_stages(
        constant=stage(4500, 128, 39),  # stages of one length are sorted by name
        decay=stage(1500, 128, 20, data=dict(masked_lm_prob=0.15), optimizer=FALLING | dict(decay_to=0.04)),
    )
    config.batch_size = 32
    config.optimizer.update(learning_rate=2e-3, warmup_steps=200)
    config.eval.update(every_steps=1000, max_sequences=1024)
    config.checkpoint.every_steps = 1000
    return config

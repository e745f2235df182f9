"""ModernBERT (Warner et al. 2024), of its sizes and of Ettin's: base, large, 17m, 32m, 68m, 150m, 400m, 1b.

The first phase of Ettin's recipe (Weller et al. 2025): 1.7 T tokens in sequences of 1,024, 30 % of them masked, with
a constant rate after 3 B tokens. Their batch grows to this size; their two later phases, of longer sequences with a
falling rate, are not here yet: the vocabulary, a byte-level BPE as theirs, is learnt from the corpus.

Command:  bertjax train --config=modern:base --config.data.corpus=texts/ --workdir=runs/modern
Hardware: not run at any of these sizes
Paper:    not comparable: other data and vocabularies
"""

from bertjax.config import named_stages, pretraining_config, stage
from bertjax.families import model_fields

# Layers, hidden size, width of the gated product, heads, and the peak of the learning rate.
SIZES = {
    "17m": (7, 256, 384, 4, 3e-3),
    "32m": (10, 384, 576, 6, 3e-3),
    "68m": (19, 512, 768, 8, 3e-3),
    "150m": (22, 768, 1152, 12, 8e-4),
    "400m": (28, 1024, 2624, 16, 5e-4),
    "1b": (28, 1792, 3840, 28, 5e-4),
}
SIZES |= {"base": SIZES["150m"], "large": SIZES["400m"]}
BATCH, LENGTH = 4608, 1024


def get_config(size="base"):
    layers, hidden, inner, heads, rate = SIZES[size]
    config = pretraining_config()
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads)
    config.model = model_fields("modernbert", **sizes)
    config.tokenizer.update(kind="bpe", lowercase=False)
    config.data.update(next_sentence="none", masking="dynamic", masked_lm_prob=0.3, dupe_factor=1)
    config.stages = named_stages(pretraining=stage(round(1.7e12 / BATCH / LENGTH), LENGTH, 308))
    config.batch_size, config.packing = BATCH, True
    recipe = dict(name="stable_adamw", learning_rate=rate, schedule="constant")
    config.optimizer.update(**recipe, warmup_steps=round(3e9 / BATCH / LENGTH), beta2=0.98, epsilon=1e-6)
    config.optimizer.weight_decay = 3e-4 if rate > 1e-3 else 1e-5
    return config

"""The encoder of the original Transformer (Vaswani et al. 2017), trained on masked words: base, big.

6 layers of 512 or 1,024, with 8 or 16 heads: sinusoidal positions, a LayerNorm after each sum, ReLU. bertjax does not
translate, so it has no decoder. Adam has the paper's hyperparameters and peak rate (section 5.3). The rate falls
linearly, not by the root of the step. A step has the paper's number of tokens of one language (5.1). There is no weight
decay and no gradient clipping.

Command:  bertjax train --config=transformer:base --config.data.corpus=texts/ --workdir=runs/transformer
Hardware: not run at these sizes; the paper, with the decoder: 8 P100, 12 hours and 3.5 days
Paper:    not comparable: the paper's model translates
"""

from bertjax.config import UserError, model_size, named_stages, pretraining_config, stage

# Size, dropout (table 3), steps (section 5.2).
SIZES = {"base": ("6-512-8", 0.1, 100_000), "big": ("6-1024-16", 0.3, 300_000)}
WARM_UP = 4000


def get_config(size="base"):
    if size not in SIZES:
        raise UserError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    name, dropout, steps = SIZES[size]
    config = pretraining_config()
    config.model.update(model_size(name), positions="sinusoidal", norm="post", hidden_act="relu", type_vocab_size=1)
    config.model.update(hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0)  # residuals only (section 5.4)
    config.data.update(next_sentence="none", masking="dynamic", dupe_factor=1)
    config.stages, config.batch_size = named_stages(only=stage(steps, 128, 20)), 192
    peak = (config.model.hidden_size * WARM_UP) ** -0.5
    config.optimizer.update(learning_rate=peak, warmup_steps=WARM_UP, beta2=0.98, epsilon=1e-9, bias_correction=True)
    config.optimizer.update(weight_decay=0.0, max_grad_norm=1e9)  # the paper uses neither option
    return config

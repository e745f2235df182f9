"""ELECTRA (Clark et al. 2020): small and base, which detect the words that a small generator has replaced.

As in the paper's table 6 and Google's configure_pretraining.py: 15 % of the tokens are predicted, 85 % of these masked
and the rest unchanged. The generator has a fourth of the width of small, or a third of the width of base, and shares
the embeddings. The weight of the discriminator's loss is 50. Google's code splits a text into two segments; here a text
is one segment.

Command:  bertjax train --config=electra:small --config.data.corpus=texts/ --workdir=runs/electra
          bertjax convert --source=runs/electra --output=generator --format=huggingface --part=generator
Hardware: not run at these sizes; the paper: small 4 days on a V100, base 4 days on 16 TPUv3 chips
Paper:    not comparable: other data and vocabularies; GLUE 79.9 and 85.1 on the dev sets (table 1)
"""

from bertjax import objectives
from bertjax.config import UserError, named_stages, pretraining_config, stage
from bertjax.models import model_fields

SIZES = {
    "small": dict(embedding_size=128, hidden_size=256, num_attention_heads=4, intermediate_size=1024),
    "base": dict(embedding_size=768, hidden_size=768, num_attention_heads=12, intermediate_size=3072),
}


def get_config(size="small"):
    if size not in SIZES:
        raise UserError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    config = pretraining_config()
    config.model = model_fields("electra", **SIZES[size])
    width = 1 / 4 if size == "small" else 1 / 3
    objectives.learn(config, "50*replaced + generator", generator=dict(width=width))
    config.data.update(next_sentence="none", masking="dynamic", masked_lm_split=(0.85, 0.0, 0.15), dupe_factor=1)
    if size == "small":
        config.stages, config.batch_size = named_stages(only=stage(1_000_000, 128, 19)), 128
        config.optimizer.learning_rate = 5e-4
    else:
        config.stages, config.batch_size = named_stages(only=stage(766_000, 512, 79)), 256
        config.optimizer.learning_rate = 2e-4
    config.eval.fill_masks = ()
    return config

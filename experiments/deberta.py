"""DeBERTa-v3 (He et al. 2021, arXiv 2111.09543) in the sizes xsmall, base and large: detects replaced words.

The generator has the width and half of the layers of the discriminator. The embeddings of the discriminator are the
embeddings of the generator plus a difference; the loss of the discriminator, whose weight is 50, changes the difference
only. Steps, batches and rates are those of rtd.sh in the code of the paper. Here 15 % of the tokens are predicted, with
BERT's split, and the embeddings of distances have no dropout. The tokenizer is a tokenizer.json or spm.model of
DeBERTa-v3, because bertjax learns no vocabulary of this kind.

Command:  bertjax train --config=deberta:base --config.data.corpus=texts/ --config.tokenizer.path=spm.model
          --workdir=runs/deberta
          bertjax convert --source=runs/deberta --output=deberta --format=huggingface
Hardware: not run at these sizes
Paper:    not comparable: other data
"""

from bertjax import objectives
from bertjax.config import UserError, named_stages, pretraining_config, stage
from bertjax.models import model_fields

# Layers, hidden size, heads, batch size, peak of the learning rate.
SIZES = {
    "xsmall": (12, 384, 6, 64, 3e-4),
    "base": (12, 768, 12, 256, 1e-4),
    "large": (24, 1024, 16, 256, 1e-4),
}


def get_config(size="base"):
    if size not in SIZES:
        raise UserError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    layers, hidden, heads, batch_size, rate = SIZES[size]
    config = pretraining_config()
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=heads)
    config.model = model_fields("deberta_v2", **sizes)
    generator = dict(width=1.0, layers=0.5, embeddings="disentangled")
    objectives.learn(config, "50*replaced + generator", generator=generator)
    config.tokenizer.update(kind="unigram", lowercase=False)
    config.data.update(next_sentence="none", masking="dynamic", dupe_factor=1)
    config.stages, config.batch_size = named_stages(only=stage(1_000_000, 512, 77)), batch_size
    config.optimizer.update(learning_rate=rate, warmup_steps=10_000)
    config.eval.fill_masks = ()
    return config

"""Transformer-XL (Dai et al. 2019) of the paper's base sizes: wikitext, enwik8; and cores, for two CPU cores.

As in the released scripts (run_wt103_base.sh, run_enwik8_base.sh): Adam at 2.5e-4 with a cosine decay to 0 and no
warm-up; dropout 0.1, but not in attention probabilities; clipping at a norm of 0.25; a longer memory in evaluation.
wikitext has 32,000 learned tokens; the paper has 267,735 words and an adaptive softmax. enwik8 is read as bytes. Both
are read like any text here: paragraphs are documents, one space separates sentences, and some documents are held out.
The scores are therefore scores of a different text than in the paper.

cores is small enough for hours of training on two CPU cores.

Command:  bertjax train --config=transformer_xl:enwik8 --config.data.corpus=enwik8.txt --workdir=runs/enwik8
Hardware: 4 GPUs, days, for the base sizes; not run here
Paper:    24.0 perplexity of words on WikiText-103 (table 1); 1.06 bits per character on enwik8 (table 2)
"""

from bertjax.config import UserError, named_stages, pretraining_config, stage
from bertjax.models import model_fields

# The memory length of evaluation, and the maximum distance.
EVALUATION = {"wikitext": (640, 400), "enwik8": (2100, 820), "cores": (0, 0)}
# Layers, hidden size, heads, width of the feed-forward network; length of sequences and of the memory; rows; steps.
SIZES = {
    "wikitext": (16, 410, 10, 2100, 150, 60, 200_000),
    "enwik8": (12, 512, 8, 2048, 512, 22, 400_000),
    "cores": (6, 256, 4, 1024, 128, 32, 6000),
}


def get_config(size="wikitext"):
    if size not in SIZES:
        raise UserError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    layers, hidden, heads, inner, length, rows, steps = SIZES[size]
    config = pretraining_config()
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=inner)
    config.model = model_fields("transformer_xl", **sizes, memory_length=length)
    config.model.vocab_size = {"wikitext": 32_000, "enwik8": 261, "cores": 8000}[size]
    config.tokenizer.update(kind="bytes" if size == "enwik8" else "bpe", lowercase=False)
    config.data.update(next_sentence="none", masking="dynamic", dupe_factor=1, short_seq_prob=0.0, stream=True)
    config.stages = named_stages(only=stage(steps, length, -(-15 * length // 100)))
    config.batch_size = rows
    config.optimizer.update(learning_rate=2.5e-4, schedule="cosine", warmup_steps=0, bias_correction=True)
    config.optimizer.update(epsilon=1e-8, weight_decay=0.0, max_grad_norm=0.25)
    config.eval.fill_masks = ()
    config.eval.memory_length, config.eval.clamp_length = EVALUATION[size]
    if size == "cores":
        config.optimizer.update(learning_rate=1e-3, warmup_steps=200)
        config.eval.update(every_steps=1000, max_sequences=1024)
        config.checkpoint.every_steps = 1000
    return config

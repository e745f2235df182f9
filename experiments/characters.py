"""Left-to-right models of characters with auxiliary losses (Al-Rfou et al. 2019): t64, t12; and cores.

The 64 or 12 layers of 512 have two heads and an inner width of 2,048. Each layer has separate position embeddings.
Layers before the last layer also predict the next two characters, the l-th of n layers up to l / 2n of the training.
The recipe is in the paper's section "Training": 4 M steps of 16 sequences of 512 bytes, a momentum of 0.99, and a
constant rate of 0.003. The paper has dropout of 0.55 in attention and after ReLU. bertjax has no dropout after ReLU, so
the residual dropout is 0.1 here. Two more differences: gradients are clipped here, and the last layer's head is the
embedding table.

cores is small enough for two CPU cores: 6 layers of 128, with Adam.

Command:  bertjax train --config=characters:t12 --config.data.corpus=texts/ --workdir=runs/characters
          --config.eval.bits_windows=200 also measures bits per byte of held-out text, also for a model of bytes.py
Hardware: not run at the paper's sizes; the paper: t64 175 hours on a TPU v2, for 2.5 M steps
Paper:    bits per byte of enwik8's test set 1.06 (t64) and 1.11 (t12), each byte after 512 bytes; here
          255 bytes precede a byte of a sequence on average
"""

from bertjax import objectives
from bertjax.config import UserError, model_size, named_stages, pretraining_config, stage

SIZES = {"t64": "64-512-2", "t12": "12-512-2", "cores": "6-128-2"}


def get_config(size="t12"):
    if size not in SIZES:
        raise UserError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    config = pretraining_config()
    objectives.learn(config, "lm + auxiliary", auxiliary=dict(layers_until=0.5, targets=2, target_weight=0.5))
    config.tokenizer.update(kind="bytes", lowercase=False)
    config.model.update(model_size(SIZES[size]), causal=True, positions="each_layer", output="plain", hidden_act="relu")
    config.model.update(vocab_size=261, type_vocab_size=1, attention_probs_dropout_prob=0.55)
    config.data.update(next_sentence="none", masking="dynamic", dupe_factor=1)
    config.packing = True
    config.stages, config.batch_size = named_stages(only=stage(4_000_000, 512, 77)), 16
    config.optimizer.update(name="sgd", options="momentum=0.99", schedule="constant", learning_rate=3e-3)
    config.optimizer.update(warmup_steps=0, weight_decay=0.0)
    config.eval.fill_masks = ()
    return for_cores(config) if size == "cores" else config


def for_cores(config):
    config.model.update(max_position_embeddings=256, initializer_range=0.05)
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.stages = named_stages(only=stage(6000, 256, 39))
    config.optimizer.update(name="adam", options="", schedule="linear", learning_rate=2e-3, warmup_steps=200)
    config.optimizer.update(weight_decay=0.01, bias_correction=True)
    config.eval.update(every_steps=1000, max_sequences=512)
    config.checkpoint.every_steps = 1000
    return config

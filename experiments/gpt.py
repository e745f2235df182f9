"""A left-to-right language model of GPT's sizes: gpt, gpt2, gpt2-medium, gpt2-large, gpt2-xl.

The modules are the modules of BERT with a causal mask. Token types and WordPiece are also the same as in BERT, and the
rate decays linearly. gpt2 has a LayerNorm before each part, as published. GPT-2's published weights have this form
(docs/models.md).

Command:  bertjax train --config=gpt:gpt2 --config.data.corpus=texts/ --workdir=runs/gpt2
Hardware: 8 GPUs, a month, for gpt (Radford et al. 2018); small models on two CPU cores: ablations/RESULTS.md
Paper:    not comparable: other data and vocabularies
"""

from bertjax.config import model_size, named_stages, pretraining_config, stage


def get_config(size="gpt2"):
    config = pretraining_config()
    length = 1024 if size.startswith("gpt2") else 512
    config.model.update(model_size(size), causal=True, output="plain")
    config.model.update(layer_norm_eps=1e-5, max_position_embeddings=length)
    config.model.norm = "pre" if size.startswith("gpt2") else "post"
    config.data.update(next_sentence="none", masking="dynamic", dupe_factor=1)
    config.stages = named_stages(only=stage(800_000, length, 154))
    # Like GPT (section 4.1): 64 sequences, rates up to 2.5e-4 after 2,000 steps.
    config.batch_size = 64
    config.optimizer.update(learning_rate=2.5e-4, warmup_steps=2000, bias_correction=True)
    config.eval.fill_masks = ()
    return config

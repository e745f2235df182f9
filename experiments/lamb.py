"""BERT-large in 15,625 steps of 32,768 sequences with LAMB (You et al. 2020, tables 1 and 4).

Command:  as in base.py, with --config=lamb
Hardware: 1,024 TPU v3 chips in the paper; fits a v5litepod-256 by bertjax compile; not run here yet
Paper:    F1 91.5 on SQuAD 1.1's dev set (You et al. 2020, table 1)
"""

from bertjax.config import model_size, named_stages, pretraining_config, stage


def get_config():
    config = pretraining_config()
    config.model.update(model_size("large"))
    config.batch_size, config.microbatches = 32_768, 4
    config.remat = "auto"
    config.stages = named_stages(short=stage(14_063, 128, 20), long=stage(1_562, 512, 77))  # nine tenths at length 128
    config.optimizer.update(name="lamb", learning_rate=5e-3, warmup_steps=3_125, bias_correction=True)
    return config

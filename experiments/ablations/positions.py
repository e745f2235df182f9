"""Position embeddings: learned (BERT), sinusoidal (the original Transformer), none.

Command:  bertjax train --config=experiments/ablations/positions.py:none --config.data.corpus=texts/ --workdir=runs/none
Hardware: small models on two CPU cores: RESULTS.md
Paper:    not in the BERT paper; "nearly identical results" in translation (Vaswani et al. 2017, table 3, row E)
"""

from bertjax.config.defaults import pretraining_config


def get_config(positions="learned"):
    config = pretraining_config()
    config.data.masking = "dynamic"
    config.model.positions = positions
    return config

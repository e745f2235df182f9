"""Model sizes, as in the paper's ablation: LAYERS-HIDDEN-HEADS.

The paper has 3-768-12, 6-768-3, 6-768-12, 12-768-12 (base), 12-1024-16 and 24-1024-16 (large). Other sizes work too.

Command:  bertjax train --config=experiments/ablations/size.py:6-768-12 --config.data.corpus=texts/ --workdir=runs/6
Hardware: 4 to 16 Cloud TPUs (16 to 64 chips), 4 days, in the paper; small models on two CPU cores: RESULTS.md
Paper:    held-out perplexity of masked words, dev accuracy of MNLI-m, MRPC and SST-2 (Devlin et al. 2019, table 6):
          3-768-12 5.84, 77.9 79.8 88.4; 6-768-3 5.24, 80.6 82.2 90.7; 6-768-12 4.68, 81.9 84.8 91.3; 12-768-12 3.99,
          84.4 86.7 92.9; 12-1024-16 3.54, 85.7 86.9 93.3; 24-1024-16 3.23, 86.6 87.8 93.7
"""

from bertjax.config.defaults import pretraining_config
from bertjax.config.model_config import model_size


def get_config(size="12-768-12"):
    config = pretraining_config()
    config.data.masking = "dynamic"
    config.model.update(model_size(size))
    return config

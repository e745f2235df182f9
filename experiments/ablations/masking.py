"""Treatment of the predicted words, as in the paper's ablation: MASK-SAME-RANDOM, in percent.

The paper's rows are 80-10-10 (BERT), 100-0-0, 80-0-20, 80-20-0, 0-20-80 and 0-0-100. All other values work as well.

Command:  bertjax train --config=experiments/ablations/masking.py:0-0-100 --config.data.corpus=texts/ --workdir=runs/m
Hardware: 4 Cloud TPUs (16 chips), 4 days, in the paper; small models on two CPU cores: RESULTS.md
Paper:    dev accuracy of MNLI-m fine-tuned, F1 of CoNLL-2003 fine-tuned and feature-based (Devlin et al. 2019, table
          8): 80-10-10 84.2 95.4 94.9, 100-0-0 84.3 94.9 94.0, 80-0-20 84.1 95.2 94.6, 80-20-0 84.4 95.2 94.7, 0-20-80
          83.7 94.8 94.6, 0-0-100 83.6 94.9 94.6
"""

import re

from bertjax.common.errors import UserError
from bertjax.config.defaults import pretraining_config


def get_config(percent="80-10-10"):
    if not re.fullmatch(r"\d+-\d+-\d+", percent):
        raise UserError(f"{percent!r} is not MASK-SAME-RANDOM in percent, such as 80-10-10")
    mask, same, random = (int(share) / 100 for share in percent.split("-"))
    config = pretraining_config()
    config.data.masking = "dynamic"
    config.data.masked_lm_split = (mask, random, same)
    return config

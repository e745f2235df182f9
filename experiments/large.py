"""BERT-large, uncased, as published: the recipe of base.py for 24 layers of 1024.

Command:  as in base.py, with --config=large
Hardware: 16 Cloud TPUs (64 chips) for 4 days in the paper, appendix A.2; not run here yet
Paper:    GLUE 82.1 on the test sets (Devlin et al. 2019, table 1)
"""

from bertjax.config import model_size, pretraining_config


def get_config():
    config = pretraining_config()
    config.model.update(model_size("large"))
    config.remat = "auto"
    return config

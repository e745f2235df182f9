"""The smaller BERTs of Turc et al. 2019 by the recipe of base.py: tiny, mini, small, medium.

Command:  as in base.py, with --config=small:mini
Hardware: not run to the end here yet
Paper:    GLUE 64.2, 65.8, 71.2, 73.5 on the test sets (README of google-research/bert)
"""

from bertjax.config import model_size, pretraining_config


def get_config(size="mini"):
    config = pretraining_config()
    config.model.update(model_size(size))
    return config

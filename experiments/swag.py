"""Which of four endings follows: SWAG.

Command:  python -m bertjax.main --config=experiments/swag.py --config.init_checkpoint=DIR --config.data.path=SWAG
          SWAG: the folder with train.csv and val.csv
Hardware: one Cloud TPU, an hour at most, or a GPU, a few (Devlin et al. 2019, section 3.2); not run at that size yet
Score:    BERT-base on the dev set: accuracy 81.6 (Devlin et al. 2019, table 4)
"""

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config("swag")
    config.batch_size = 16
    return config

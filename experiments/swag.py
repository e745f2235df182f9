"""Which of four endings follows: SWAG.

Command:  python -m bertjax.main --config=experiments/swag.py --config.init_checkpoint=DIR --config.data.path=SWAG
          SWAG: the folder with train.csv and val.csv
Score:    BERT-base on the dev set: accuracy 81.6 (Devlin et al. 2019, table 4)
"""

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config("swag")
    config.batch_size = 16
    return config

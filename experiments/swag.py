"""Which of four endings follows: SWAG.

Command:  bertjax train --config=swag --config.init_checkpoint=DIR --config.data.path=SWAG
          SWAG is the folder with train.csv and val.csv
Hardware: one Cloud TPU, at most an hour, or a GPU, a few hours, in the paper, section 3.2; not run at that size yet
Paper:    BERT-base on the dev set: accuracy 81.6 (Devlin et al. 2019, table 4)
"""

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config("swag")
    config.batch_size = 16
    return config

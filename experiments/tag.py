"""A tagger of your own words: train.csv and dev.csv (or .tsv) with a word a row, or .jsonl with a sentence a row.

Command:  bertjax train --config=tag --config.init_checkpoint=DIR --config.data.path=FOLDER
          --config.data.words=COLUMN --config.data.tags=COLUMN
Hardware: data of GLUE's size: one Cloud TPU, at most an hour, or a GPU, a few hours (Devlin et al. 2019, section 3.2)
"""

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config(
        "tag",
        words="words",  # a word; in .jsonl the list of them
        tags="tags",  # its tag; in .jsonl the list of them. O, B-type and I-type are entities
        sentence="sentence",  # column that is the same in all rows of a sentence; .jsonl has none
        heldout_seed=0,  # if data.path is one file: chooses the tenth of it that is the dev set
    )
    config.optimizer.learning_rate = 5e-5
    return config

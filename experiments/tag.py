"""A tagger of your own words: train.csv and dev.csv (or .tsv) with a word a row, or .jsonl with a sentence a row.

Command:  bertjax train --config=tag --config.init_checkpoint=DIR --config.data.path=FOLDER
          --config.data.words=COLUMN --config.data.tags=COLUMN
Hardware: data of GLUE's size: one Cloud TPU, at most an hour, or a GPU, a few hours (Devlin et al. 2019, section 3.2)
"""

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config(
        "tag",
        words="words",  # column of the word; in .jsonl, the list of words
        tags="tags",  # column of the tag; in .jsonl, the list of tags. O, B-type and I-type are entities
        sentence="sentence",  # column with the same value in all rows of a sentence; not used for .jsonl
        heldout_seed=0,  # if data.path is one file: the seed that draws a tenth of it as the dev set
    )
    config.optimizer.learning_rate = 5e-5
    return config

"""A tagger of your own words: train.csv and dev.csv (or .tsv) with a word a row, or .jsonl with a sentence a row.

Command:  python -m bertjax.main --config=experiments/tag.py --config.init_checkpoint=DIR --config.data.path=FOLDER
          --config.data.words=COLUMN --config.data.tags=COLUMN
Hardware: one Cloud TPU, an hour at most, or a GPU, a few for data like GLUE's (Devlin et al. 2019, section 3.2)
"""

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config(
        "tag",
        words="words",  # a word; in .jsonl the list of them
        tags="tags",  # its tag; in .jsonl the list of them. O, B-type and I-type are entities
        sentence="sentence",  # column that is the same in all rows of a sentence; .jsonl has none
    )
    config.optimizer.learning_rate = 5e-5
    return config

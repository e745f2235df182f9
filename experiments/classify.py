"""A classifier of your own texts: train.csv and dev.csv (or .tsv, .jsonl) in a folder, labels as they are found there.

Command:  python -m bertjax.main --config=experiments/classify.py --config.init_checkpoint=DIR --config.data.path=FOLDER
          --config.data.text=COLUMN --config.data.label=COLUMN
Hardware: one Cloud TPU, an hour at most, or a GPU, a few for data like GLUE's (Devlin et al. 2019, section 3.2)
"""

from bertjax.config import fine_tuning_config


def get_config():
    return fine_tuning_config(
        "classify",
        text="text",
        second_text="",  # column of the other text, where pairs are classified
        label="label",
        is_number=False,  # labels are numbers to be predicted, not classes
    )

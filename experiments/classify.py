"""A classifier of your own texts: train.csv and dev.csv (or .tsv, .jsonl) in a folder, with any names as labels.

Command:  bertjax train --config=classify --config.init_checkpoint=DIR --config.data.path=FOLDER
          --config.data.text=COLUMN --config.data.label=COLUMN
Hardware: data of GLUE's size: one Cloud TPU, at most an hour, or a GPU, a few hours (Devlin et al. 2019, section 3.2)
"""

from bertjax.config import fine_tuning_config


def get_config():
    return fine_tuning_config(
        "classify",
        text="text",
        second_text="",  # column of the second text of a pair
        # The column of the labels. Several columns, separated by commas: one per label, with 1 or 0.
        label="label",
        # For several labels per text in one column: "list", or the character that separates the labels.
        multi_label="",
        # Texts longer than max_seq_length are truncated, or read in windows with a stride of doc_stride tokens. The
        # logits of the windows are combined: mean | max.
        windows="",
        doc_stride=64,
        is_number=False,  # the labels are numbers (regression), not classes
        heldout_seed=0,  # if data.path is one file: the seed that draws a tenth of it as the dev set
    )

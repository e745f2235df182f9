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
        second_text="",  # column of the other text, where pairs are classified
        # The column of the labels; several, separated by commas, have 0 or 1 each: whether a text has their label.
        label="label",
        # A text has any number of the labels in its column: a list of them (list), or those between this character.
        multi_label="",
        # Texts longer than max_seq_length are truncated; or read in windows, which begin doc_stride tokens after each
        # other, and whose logits are combined: mean | max.
        windows="",
        doc_stride=64,
        is_number=False,  # labels are numbers to be predicted, not classes
        heldout_seed=0,  # if data.path is one file: chooses the tenth of it that is the dev set
    )

"""BERT-base, uncased, as published: 1,000,000 steps of 256 sequences, 900,000 of them at length 128, the rest at 512.

Command:  bertjax prepare --config=base --config.data.corpus=CORPUS --config.tokenizer.path=VOCAB.TXT --output=RECORDS
          bertjax train --config=base --config.data.records=RECORDS --workdir=DIR
          (on one machine, train alone does both; without tokenizer.path, bertjax learns a vocabulary)
Hardware: 4 Cloud TPUs (16 chips) for 4 days in the paper, appendix A.2; not run to the end here yet
Paper:    GLUE 79.6 on the test sets (Devlin et al. 2019, table 1)
"""

from bertjax.config import pretraining_config


def get_config():
    config = pretraining_config()
    config.remat = "auto"
    return config

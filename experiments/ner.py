"""Named entities: CoNLL-2003.

Command:  python -m bertjax.main --config=experiments/ner.py --config.init_checkpoint=DIR --config.data.path=CONLL
          CONLL: the folder with eng.train and eng.testa. Other files of this form serve as well: train.txt, dev.txt
Hardware: one Cloud TPU, an hour at most, or a GPU, a few (Devlin et al. 2019, section 3.2); not run at that size yet
Score:    BERT-base, cased, on the dev set: F1 96.4 (Devlin et al. 2019, table 7)
"""

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config("ner", document_context=True)  # neighbouring sentences of a document are read together
    config.max_seq_length = 256
    config.optimizer.learning_rate = 5e-5
    return config

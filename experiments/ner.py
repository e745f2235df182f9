"""Named entities: CoNLL-2003.

Command:  bertjax train --config=ner --config.init_checkpoint=DIR --config.data.path=CONLL
          CONLL is the folder with eng.train and eng.testa, or with train.txt and dev.txt in the same format
Hardware: one Cloud TPU, at most an hour, or a GPU, a few hours, in the paper, section 3.2; not run at that size yet,
          but with a model of 6 layers on 3,000 sentences: experiments/benchmarks/RESULTS.md
Paper:    BERT-base, cased, on the dev set: F1 96.4 (Devlin et al. 2019, table 7)
"""

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config("ner", document_context=True)  # neighbouring sentences of a document are read together
    config.max_seq_length = 256
    config.optimizer.learning_rate = 5e-5
    return config

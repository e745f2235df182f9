"""Named entities by a BiLSTM over a BERT whose weights stay fixed: the rows of the paper's table 7.

Command:  bertjax train --config=features:concat_last_four --config.init_checkpoint=DIR --config.data.path=CONLL
          All six rows in one table: --config.sweep=paper
Hardware: one Cloud TPU, at most an hour, or a GPU, a few hours, in the paper, section 3.2; not run at that size yet
Paper:    BERT-base, cased, F1 on CoNLL-2003's dev set (Devlin et al. 2019, table 7): embeddings 91.0, second_to_last
          95.6, last 94.9, weighted_sum_last_four 95.9, concat_last_four 96.1, weighted_sum_all 95.5
"""

from bertjax.config import fine_tuning_config


def get_config(layers="concat_last_four"):
    config = fine_tuning_config("features", document_context=True).unlock()
    # The paper gives only the 768 units per direction. The rate and the epochs are choices of this project.
    config.head.layers = layers
    config.head.update(lstm_size=768, lstm_layers=2)
    config.max_seq_length = 256
    config.epochs = 10.0
    config.optimizer.learning_rate = 1e-3
    return config.lock()

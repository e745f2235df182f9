"""Objectives of pre-training, as in the paper's ablation: bert, no_nsp, ltr, ltr_bilstm; and ALBERT's order.

bert: masked words and next sentences. no_nsp: masked words only, of full sentences. ltr: a left-to-right model,
which sees only previous words and predicts the next word (like GPT, with BERT's data and input). ltr_bilstm: the
same, with a BiLSTM on top in fine-tuning (--config.head.lstm_size=768). order: masked words, and the order of two
consecutive segments (Lan et al. 2020, section 3.1).

Command:  bertjax train --config=experiments/ablations/objective.py:ltr --config.data.corpus=texts/ --workdir=runs/ltr
Hardware: 4 Cloud TPUs (16 chips), 4 days, in the paper; small models on two CPU cores: RESULTS.md
Paper:    BERT-base's size, dev sets (Devlin et al. 2019, table 5), MNLI-m, QNLI, MRPC, SST-2 accuracy, SQuAD 1.1 F1:
          bert 84.4 88.4 86.7 92.7 88.5, no_nsp 83.9 84.9 86.5 92.6 87.9, ltr 82.1 84.3 77.5 92.1 77.8, ltr_bilstm 82.1
          84.1 75.7 91.6 84.9
"""

from bertjax.common.errors import UserError
from bertjax.config.defaults import pretraining_config

NAMES = ("bert", "no_nsp", "ltr", "ltr_bilstm", "order")


def get_config(name="bert"):
    if name not in NAMES:
        raise UserError(f"unknown objective {name!r}: choose one of {', '.join(NAMES)}")
    config = pretraining_config()
    config.data.masking = "dynamic"  # all objectives with the same sentences share one set of records
    if name != "bert":
        config.data.next_sentence = "order" if name == "order" else "none"
    if name.startswith("ltr"):
        config.model.causal = True
        config.eval.fill_masks = ()
    return config

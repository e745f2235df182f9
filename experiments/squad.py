"""Answers to questions about a paragraph: SQuAD v1.1, v2.0.

Command:  bertjax train --config=squad:v1.1 --config.init_checkpoint=DIR --config.data.path=SQUAD
          SQUAD is the folder with train-v1.1.json and dev-v1.1.json
Hardware: one Cloud TPU, at most an hour, or a GPU, a few hours, in the paper, section 3.2; not run at that size yet,
          but with a model of 6 layers on 3,000 questions: experiments/benchmarks/RESULTS.md
Paper:    BERT-base on the dev set of v1.1: EM 80.8, F1 88.5 (Devlin et al. 2019, table 2)
"""

from bertjax.config import fine_tuning_config


def get_config(version="v1.1"):
    config = fine_tuning_config(
        "squad",
        version=version,
        doc_stride=128,
        max_query_length=64,
        on_bad_answer="stop",  # for an answer that is not at its answer_start: stop | skip (in training; counted)
    )
    config.max_seq_length = 384
    config.optimizer.learning_rate = 5e-5 if version == "v1.1" else 3e-5
    config.epochs = 3.0 if version == "v1.1" else 2.0
    return config

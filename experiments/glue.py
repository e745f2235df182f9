"""Fine-tuning on a task of GLUE: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, ax.

Command:  bertjax train --config=glue:mrpc --config.init_checkpoint=DIR --config.data.path=GLUE
          GLUE is the folder of gluebenchmark.com with CoLA, MRPC, ..., or tfds:glue/mrpc. ax trains on MNLI and
          scores MNLI/diagnostic-full.tsv if the file exists
Hardware: one Cloud TPU, at most an hour, or a GPU, a few hours, in the paper, section 3.2; not run at that size yet,
          but with a model of 6 layers, against transformers: experiments/benchmarks/RESULTS.md
Paper:    BERT-base on the test sets: CoLA 52.1, SST-2 93.5, MRPC 88.9, STS-B 85.8, QQP 71.2, MNLI 84.6/83.4, QNLI 90.5,
          RTE 66.4 (Devlin et al. 2019, table 1)
"""

from bertjax.config import fine_tuning_config


def get_config(name="mrpc"):
    return fine_tuning_config("glue", name=name)

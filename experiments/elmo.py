"""A forward and a backward LSTM that predict next and previous words, like ELMo: features for other models.

features:weighted_sum_with_embeddings is the learned mix of its layers. ELMo reads characters and has larger LSTMs.

Command:  bertjax train --config=elmo --config.data.corpus=texts/ --workdir=runs/elmo
          bertjax train --config=features:weighted_sum_with_embeddings --config.init_checkpoint=runs/elmo ...
Hardware: not run at this size; a small model on two CPU cores: ablations/RESULTS.md
Paper:    F1 of CoNLL-2003 on the test set 92.2 (Peters et al. 2018, table 1), on the dev set 95.7 (Devlin et al. 2019,
          table 7)
"""

from bertjax.config import named_stages, pretraining_config, stage


def get_config():
    config = pretraining_config()
    config.model.update(family="lstms", positions="none", num_hidden_layers=2, hidden_size=1024, num_attention_heads=1)
    config.data.update(next_sentence="none", masking="dynamic", dupe_factor=1)
    config.stages = named_stages(only=stage(900_000, 128, 20))
    config.eval.fill_masks = ()
    return config

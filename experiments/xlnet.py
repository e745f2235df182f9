"""XLNet (Yang et al. 2019): base, large; and cores.

large has the recipe of the paper's appendix A.4: 500,000 steps of 8,192 sequences, on 512 TPU v3 chips. base is a model
of the paper's ablations with BERT-base's size; here it also has BERT-base's recipe. Both read two segments, like BERT,
and learn 32,000 tokens with SentencePiece. The paper's model also has a recurrent memory of a part of the previous
sequence. For rows of one segment, `--config.data.stream=True` with `next_sentence` none and `short_seq_prob` 0 does the
same. The paper's corpus for large has 33 B tokens.

cores is small enough for two CPU cores.

Command:  bertjax train --config=xlnet:base --config.data.corpus=texts/ --workdir=runs/xlnet
Hardware: not run at any of these sizes
Paper:    not comparable: other data and vocabularies
"""

from bertjax import objectives
from bertjax.config import model_size, named_stages, pretraining_config, stage
from bertjax.models import model_fields


def get_config(size="base"):
    config = pretraining_config()
    config.model = model_fields("xlnet", **model_size("4-256-4" if size == "cores" else size))
    config.tokenizer.update(kind="sentencepiece", lowercase=False)
    objectives.learn(config, "plm", plm=dict(k=6, max_span_words=5))
    config.data.update(masking="dynamic", dupe_factor=1)
    if size == "cores":
        config.model.vocab_size = 8000
        config.stages, config.batch_size = named_stages(only=stage(4000, 128, 22)), 64
        config.optimizer.update(learning_rate=1e-3, warmup_steps=400)
        config.eval.every_steps = 1000
        return config
    config.stages = named_stages(only=stage(1_000_000, 512, 85))
    if size == "large":
        config.stages.only.steps, config.batch_size = 500_000, 8192
        config.optimizer.update(learning_rate=4e-4, warmup_steps=40_000)
    return config

"""BERT-mini for about half an hour on two CPU cores, trained on ordinary text instead of docstrings.

Command:  python -m bertjax.main --config=experiments/benchmarks/mini_cpu.py --config.data.corpus=TEXT
              --config.tokenizer.path=vocab.txt (a published uncased one)
Hardware: 2 CPU cores, about half an hour
Score:    held out: masked words 0.78 nats below the unigram baseline, next sentence 77.4 % (51.9 %); see RESULTS.md
"""

from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.config.model_config import model_size


def get_config():
    config = pretraining_config()
    config.model.update(
        **model_size("mini"),
        max_position_embeddings=128,
        initializer_range=0.04,  # BERT-base's initialization, scaled to a hidden size of 256
        hidden_dropout_prob=0.0,  # every text is read once
        attention_probs_dropout_prob=0.0,
    )
    config.data.update(dupe_factor=1, heldout_fraction=0.02)
    config.stages = named_stages(short=stage(2000, 64, 10), long=stage(300, 128, 20))
    config.batch_size = 32
    config.optimizer.update(learning_rate=1e-3, warmup_steps=200, beta2=0.98, bias_correction=True)
    config.eval.update(every_steps=500, max_sequences=2048)
    config.checkpoint.every_steps = 500
    return config

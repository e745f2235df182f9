"""BERT from raw text to filled masks, on any machine: Python's own documentation, a small model, two stages.

Command:  python -m bertjax.main --config=experiments/quickstart.py
Hardware: 2 CPU cores
"""

from bertjax.config import default_config, stage


def get_config():
    config = default_config()
    config.data.corpus = "pydoc"
    config.data.dupe_factor = 1
    config.data.heldout_fraction = 0.04
    config.model.update(
        vocab_size=4096,
        num_hidden_layers=2,
        hidden_size=128,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,  # each text is seen about once: there is nothing to overfit
        attention_probs_dropout_prob=0.0,
    )
    config.batch_size = 32
    config.stages = (stage(900, 64, 10), stage(100, 128, 20))
    config.optimizer.update(learning_rate=1e-3, warmup_steps=100)
    config.log_every_steps = 50
    config.eval.update(
        every_steps=500,
        fill_masks=("this function returns a [MASK] of strings .", "raises an [MASK] if the [MASK] is not found ."),
    )
    config.checkpoint.every_steps = 500
    return config

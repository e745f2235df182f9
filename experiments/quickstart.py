"""BERT from raw text to filled masks on any machine: Python's own documentation, a tiny model, two short stages.

Command:  bertjax train --config=quickstart
Hardware: 2 CPU cores, 3 min 16 s
Score:    held out: masked words 1.65 nats below the unigram baseline, accuracy 24.8 % (most frequent word 4.7 %);
          next sentence 60.1 % (more frequent class 56.2 %). The text comes from the installed Python packages,
          so the scores differ between machines
"""

from bertjax.config import model_size, named_stages, pretraining_config, stage


def get_config():
    config = pretraining_config()
    config.data.update(corpus="pydoc", dupe_factor=1, heldout_fraction=0.08)
    config.model.update(
        **model_size("tiny"),
        vocab_size=2048,
        max_position_embeddings=64,
        initializer_range=0.05,  # BERT-base's initialization, scaled to a hidden size of 128
        hidden_dropout_prob=0.0,  # every text is read once or twice, so the model cannot overfit
        attention_probs_dropout_prob=0.0,
    )
    config.stages = named_stages(short=stage(2000, 32, 5), long=stage(1500, 64, 10))
    config.batch_size = 32
    # Thousands of steps instead of a million: a higher rate, and a lower decay of second moments.
    config.optimizer.update(learning_rate=3e-3, warmup_steps=200, beta2=0.98, bias_correction=True)
    config.log_every_steps = 100
    config.eval.update(
        every_steps=3500,
        fill_masks=(
            "this function returns a [MASK] of strings .",
            "if the file does not [MASK] , an error is [MASK] .",
        ),
    )
    config.checkpoint.every_steps = 1000
    return config

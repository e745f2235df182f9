"""A BERT without a vocabulary: its tokens are the bytes of UTF-8, and whole words are masked.

Command:  bertjax train --config=bytes --config.data.corpus=texts/ --workdir=runs/bytes
Hardware: not run at this size; a small model on two CPU cores: ablations/RESULTS.md
Paper:    no comparable number; a word has about five bytes, so sequences are four times as long as in base.py
"""

from bertjax.config import named_stages, pretraining_config, stage


def get_config():
    config = pretraining_config()
    config.tokenizer.kind = "bytes"
    config.model.update(vocab_size=261, max_position_embeddings=2048)
    config.stages = named_stages(short=stage(900_000, 512, 77), long=stage(100_000, 2048, 308))
    config.data.do_whole_word_mask = True
    return config

"""Continues pre-training of an encoder on the text of a domain, with new tokens for the words that it splits.

Command:  bertjax train --config=experiments/adapt.py --config.init_checkpoint=bert-base-uncased
          --config.data.corpus=domain.txt --workdir=runs/adapted
          --config.tokenizer.extend=0 keeps the vocabulary. Against forgetting, a fifth of general text:
          --config.data.corpus=domain.txt,general.txt --config.data.mixture=general.txt=20%
Hardware: by the model: BERT-base as base.py
Score:    held-out bits per byte before, during and after; see docs/adaptation.md
"""

from bertjax.config import named_stages, pretraining_config, stage


def get_config():
    config = pretraining_config()
    config.adapt.model = True
    config.tokenizer.extend = 1000
    config.data.update(
        next_sentence="none",
        masking="dynamic",
        mix_when="read",
        layout="compact",
        heldout_fraction=0.02,
        dupe_factor=1,
    )
    config.stages = named_stages(adapt=stage(10_000, 128, 20))
    # Gururangan et al. 2020, appendix B, has a warm-up of 6 % of the steps.
    config.optimizer.update(learning_rate=1e-4, warmup_steps=600, bias_correction=True)
    config.eval.update(every_steps=1000, max_sequences=2048, bits_windows=500, fill_masks=())
    config.checkpoint.every_steps = 1000
    return config

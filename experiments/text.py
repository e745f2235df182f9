"""A model of your own text, with sizes for the text, this machine and a time budget.

Command:  bertjax train --config=text --config.data.corpus=texts/ --config.budget=20min --workdir=runs/mine
          --config=text:bert trains BERT by the paper's recipe instead of ModernBERT. The budget is a time (20min, 8h,
          2d) or a number of tokens (200M), and covers everything from the start to the report. --config.FIELD=VALUE
          overrides a chosen value, such as --config.model.hidden_size=256
Hardware: any; RESULTS.md has runs on one and two CPU cores
Paper:    not comparable: other data, sizes and vocabularies
"""

from bertjax.launch.recipes import recipe_config


def get_config(recipe="modern"):
    config = recipe_config(recipe)
    config.budget = "20min"
    return config

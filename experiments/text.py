"""A model of your own text, of the sizes that suit it, this machine and a budget of time.

Command:  bertjax train --config=text --config.data.corpus=texts/ --config.budget=20min --workdir=runs/mine
          --config=text:bert trains BERT by the paper's recipe instead of ModernBERT. The budget is a time (20min, 8h,
          2d) or a number of tokens (200M), and covers everything from the start to the report. --config.FIELD=VALUE
          sets what you want to choose yourself, such as --config.model.hidden_size=256
Hardware: any; RESULTS.md has runs on one and two CPU cores
Paper:    not comparable: other data, sizes and vocabularies
"""

from bertjax.launch.recipes import recipe_config


def get_config(recipe="modern"):
    config = recipe_config(recipe)
    config.budget = "20min"
    return config

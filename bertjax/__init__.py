"""BERT from raw text to a scored task, for JAX. As a library: see docs/library.md.

Nothing is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"  # setup.py reads this line
__all__ = [
    "Answer", "Classified", "Filled", "Hit", "Model", "Scores", "SearchIndex", "Tagged", "UserError",
    "convert", "evaluate", "load", "mine", "prepare", "train",
]  # fmt: skip

if TYPE_CHECKING:
    from bertjax.common.errors import UserError
    from bertjax.embedding.index import Hit, SearchIndex
    from bertjax.inference.fill_mask import Filled
    from bertjax.library import (
        Answer,
        Classified,
        Model,
        Tagged,
        convert,
        evaluate,
        load,
        mine,
        prepare,
        train,
    )
    from bertjax.training.scores import Scores
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        others = {"UserError": "common.errors", "Scores": "training.scores"}
        others |= dict.fromkeys(("Hit", "SearchIndex"), "embedding.index")
        return getattr(importlib.import_module(f"bertjax.{others.get(name, 'library')}"), name)

    def __dir__():
        return [*globals(), *__all__]

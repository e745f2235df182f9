"""BERT from raw text to a scored task, for JAX. As a library: `load`, `train` and `prepare`, see docs/library.md.

Nothing is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"  # setup.py reads this line
__all__ = [
    "Answer", "Classified", "Filled", "Hit", "Model", "SearchIndex", "Tagged", "UserError", "load", "prepare", "train",
]  # fmt: skip

if TYPE_CHECKING:
    from bertjax.common.errors import UserError
    from bertjax.embedding.index import Hit, SearchIndex
    from bertjax.inference.fill_mask import Filled
    from bertjax.library import Answer, Classified, Model, Tagged, load, prepare, train
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        others = {"UserError": "common.errors", "Hit": "embedding.index", "SearchIndex": "embedding.index"}
        return getattr(importlib.import_module(f"bertjax.{others.get(name, 'library')}"), name)

    def __dir__():
        return [*globals(), *__all__]

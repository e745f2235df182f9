"""BERT from raw text to a scored task, for JAX. As a library: `load`, `train` and `prepare`, see docs/library.md.

Nothing is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"  # setup.py reads this line
__all__ = ["Answer", "Classified", "Filled", "Model", "Tagged", "UserError", "load", "prepare", "train"]

if TYPE_CHECKING:
    from bertjax.common.errors import UserError
    from bertjax.inference.fill_mask import Filled
    from bertjax.library import Answer, Classified, Model, Tagged, load, prepare, train
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module("bertjax.common.errors" if name == "UserError" else "bertjax.library")
        return getattr(module, name)

    def __dir__():
        return [*globals(), *__all__]

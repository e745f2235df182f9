"""BERT from raw text to a scored task, for JAX. As a library: see docs/library.md.

Nothing is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"  # setup.py reads this line
__all__ = [
    "Answer", "Classified", "Extracted", "Filled", "Hit", "MinedFile", "Model", "Ranked", "RerankedFile", "Scores",
    "SearchIndex", "Tagged", "UserError", "convert", "evaluate", "extract", "learn_vocabulary", "load", "mine",
    "prepare", "rerank", "submit", "train",
]  # fmt: skip

if TYPE_CHECKING:
    from bertjax.common.errors import UserError
    from bertjax.embedding.hard_negatives import MinedFile
    from bertjax.embedding.index import Hit, SearchIndex
    from bertjax.inference.extraction import Extracted
    from bertjax.inference.fill_mask import Filled
    from bertjax.library import (
        Answer,
        Classified,
        Model,
        Tagged,
        convert,
        evaluate,
        extract,
        learn_vocabulary,
        load,
        mine,
        prepare,
        rerank,
        submit,
        train,
    )
    from bertjax.reranking.ranking import Ranked
    from bertjax.reranking.run_files import RerankedFile
    from bertjax.training.scores import Scores
else:
    _MODULES = {  # of the names that `bertjax.library` does not define
        "Extracted": "inference.extraction",
        "Filled": "inference.fill_mask",
        "Hit": "embedding.index",
        "MinedFile": "embedding.hard_negatives",
        "Ranked": "reranking.ranking",
        "RerankedFile": "reranking.run_files",
        "Scores": "training.scores",
        "SearchIndex": "embedding.index",
        "UserError": "common.errors",
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"bertjax.{_MODULES.get(name, 'library')}"), name)

    def __dir__():
        return [*globals(), *__all__]

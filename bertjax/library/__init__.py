"""The public Python API: use, train, evaluate and convert models. `import bertjax` imports this room on first use.

`load` returns a checkpoint as a `Model`, which predicts and computes embeddings. The methods `apply` and `encode` of a
`Model` are pure functions of the params. The other functions do the work of the commands with the same names.
"""

from bertjax.library.checkpoints import convert, evaluate, extract, mine, rerank, submit
from bertjax.library.model import Model, load
from bertjax.library.runs import learn_vocabulary, prepare, train
from bertjax.library.types import Answer, Classified, Entity, Tagged

__all__ = [
    "Answer", "Classified", "Entity", "Model", "Tagged", "convert", "evaluate", "extract", "learn_vocabulary", "load",
    "mine", "prepare", "rerank", "submit", "train",
]  # fmt: skip

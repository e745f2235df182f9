"""The page for trying a checkpoint in a browser, and the page that asks for the API key.

The folder `templates` has the layouts; Jinja escapes all texts.
"""

from collections.abc import Sequence

import jinja2

from bertjax.embedding.task import similarity_of
from bertjax.library.model import Model

TEMPLATES = jinja2.Environment(loader=jinja2.PackageLoader(__package__), autoescape=True)
EXAMPLES = {  # by method
    "fill_mask": "the man went to the [MASK] to buy a [MASK] of milk .",
    "classify": "a fine film",
    "tag": "Ada Lovelace lived in London .",
    "answer": "Who wrote it? | It was written by Ada Lovelace.",
    "predict": "a text",
    "embed": "a text to compare\nanother text",
}


def page_of(model: Model, methods: Sequence[str]) -> str:
    """Returns the page for the methods of a checkpoint as HTML."""
    about = {
        "methods": methods,
        "examples": EXAMPLES,
        "embed": {} if model.makes_vectors else {"pool": "mean"},
        "similarity": similarity_of(model.source.settings),
    }
    return TEMPLATES.get_template("page.html").render(checkpoint=model.path, about=about)


def key_page() -> str:
    """Returns the page that asks for the API key and then shows the page for the methods, as HTML."""
    return TEMPLATES.get_template("key.html").render()

"""Folders of files that bertjax and its libraries keep between runs."""

import os
import tempfile
from typing import NamedTuple


class CacheFolder(NamedTuple):
    """A folder of a cache.

    Attributes:
      name: the content of the cache.
      folder: its path; it may not exist yet.
      variable: the environment variable that names another folder.
    """

    name: str
    folder: str
    variable: str


def compilation_cache() -> str:
    """Returns JAX_COMPILATION_CACHE_DIR or ~/.cache/bertjax/compiled, the folder of compiled programs."""
    home = os.path.expanduser("~")
    home = tempfile.gettempdir() if home.startswith("~") else home  # a user without a home
    return os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{home}/.cache/bertjax/compiled")


def caches() -> tuple[CacheFolder, ...]:
    """Returns the compilation cache, and the folders of downloads by their libraries' documentation."""
    variables, home = os.environ, os.path.expanduser("~")
    hugging_face = variables.get("HF_HOME", f"{variables.get('XDG_CACHE_HOME', f'{home}/.cache')}/huggingface")
    return (
        CacheFolder("compiled programs", compilation_cache(), "JAX_COMPILATION_CACHE_DIR"),
        CacheFolder("models of the hub", variables.get("HF_HUB_CACHE", f"{hugging_face}/hub"), "HF_HUB_CACHE"),
        CacheFolder(
            "data sets of the hub", variables.get("HF_DATASETS_CACHE", f"{hugging_face}/datasets"), "HF_DATASETS_CACHE"
        ),
        CacheFolder(
            "TensorFlow Datasets", variables.get("TFDS_DATA_DIR", f"{home}/tensorflow_datasets"), "TFDS_DATA_DIR"
        ),
    )

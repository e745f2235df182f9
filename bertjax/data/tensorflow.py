"""Imports TensorFlow for tf.data and for TensorFlow checkpoints, without log output, Keras, accelerators, autotuning.

If TensorFlow is not installed, the import of this module raises `UserError`. TensorFlow Datasets and Google's
checkpoints need TensorFlow. Records can be read without TensorFlow.
"""

import contextlib
import ctypes
import os
from typing import Any

from bertjax.common.errors import UserError

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ABSL_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# TensorFlow imports Keras 3, which imports matplotlib and scikit-learn if they are installed. These imports take
# seconds. With this setting, TensorFlow looks for Keras 2 instead, which is rarely installed. `tf.keras` reads the
# setting at the first use, after the setting is restored, so that `tf.keras` is not affected.
_keras_setting = os.environ.get("TF_USE_LEGACY_KERAS")
os.environ["TF_USE_LEGACY_KERAS"] = "1"
try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise UserError(
        "this needs TensorFlow, which is not installed: pip install tensorflow tensorflow-datasets"
    ) from None
finally:
    if _keras_setting is None:
        del os.environ["TF_USE_LEGACY_KERAS"]
    else:
        os.environ["TF_USE_LEGACY_KERAS"] = _keras_setting

for _kind in ("GPU", "TPU"):
    tf.config.set_visible_devices([], _kind)

# glibc returns freed memory to the system at once. A pipeline would then request the memory again page by page, which
# takes a quarter of the time of the pipeline.
_M_TOP_PAD = -2  # M_TOP_PAD in malloc.h
with contextlib.suppress(AttributeError, OSError, TypeError):  # another libc
    ctypes.CDLL(None).mallopt(_M_TOP_PAD, 64 << 20)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without autotuning, so that the numbers of parallel calls must be set.

    All datasets are read without autotuning. The autotuning thread of an iterator sleeps up to a minute between two
    rounds, and closing the iterator waits for this thread.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def load_dataset(name: str, split: str, setting: str) -> tuple[Any, tf.data.Dataset, str]:
    """Loads a split of a dataset of TensorFlow Datasets. Downloads the dataset if it is not on disk.

    Args:
      name: the name of the dataset.
      split: the name of the split.
      setting: the config field that names the dataset, for the message.

    Returns:
      The builder; the examples in file order; and a string that changes if the dataset changes.

    Raises:
      UserError: the dataset cannot be loaded.
    """
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name)
        builder.download_and_prepare()
        dataset = builder.as_dataset(split=split, shuffle_files=False)
    except Exception as error:  # the library raises many types; each means that the dataset is unavailable
        reason = str(error).strip().split("\n")[0][:300]
        raise UserError(f"{setting}: TensorFlow Datasets cannot load {name!r}, {split} ({reason})") from None
    sizes = {name: part.num_bytes for name, part in builder.info.splits.items()}
    return builder, untuned(dataset), f"{builder.info.full_name} {sizes}"

"""Imports TensorFlow for tf.data and TFRecords: without its log output, and without access to accelerators."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ABSL_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import tensorflow as tf

for _kind in ("GPU", "TPU"):
    tf.config.set_visible_devices([], _kind)

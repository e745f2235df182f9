"""Readers of records: with tf.data, and without TensorFlow."""

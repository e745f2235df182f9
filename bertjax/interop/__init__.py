"""Formats of other libraries: Hugging Face, sentence-transformers, TensorFlow 1 and PEFT, and the hub."""

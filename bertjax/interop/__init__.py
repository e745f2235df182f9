"""Other formats: folders of Hugging Face and sentence-transformers, checkpoints of TensorFlow 1, adapters of PEFT, and
the hub.
"""

"""BERT and GPT: one encoder, whose config decides which of them it is."""

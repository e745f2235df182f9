"""Use of checkpoints: predictors, mask filling, generation, likelihood, bits per byte, hidden states, embeddings."""

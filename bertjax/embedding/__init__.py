"""Training of sentence embeddings: datasets, losses, retrieval, evaluators, hard negatives."""

"""Training of sentence embeddings: datasets, losses, retrieval, hard negatives."""

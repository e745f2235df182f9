"""Jina Embeddings v3."""

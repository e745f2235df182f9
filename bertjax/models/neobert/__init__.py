"""NeoBERT."""

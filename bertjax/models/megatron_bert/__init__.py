"""MegatronBERT."""

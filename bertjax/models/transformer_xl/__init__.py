"""Transformer-XL."""

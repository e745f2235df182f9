"""Tokenizers, and vocabularies learned from text."""

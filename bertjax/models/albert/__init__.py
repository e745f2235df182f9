"""ALBERT."""

"""ELECTRA."""

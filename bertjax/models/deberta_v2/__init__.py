"""DeBERTa-v2 and DeBERTa-v3."""

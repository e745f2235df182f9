"""UltraBERT."""

"""NomicBERT."""

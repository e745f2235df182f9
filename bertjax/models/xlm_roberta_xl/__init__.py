"""XLM-RoBERTa-XL."""

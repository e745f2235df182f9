"""One module for each fine-tuning task."""

"""Model families: one folder each, with its config, modules and conversion to Hugging Face's folders."""

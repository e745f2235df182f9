"""The fields of JSON files that transformers, sentence-transformers and PEFT write: a table each, and their check."""

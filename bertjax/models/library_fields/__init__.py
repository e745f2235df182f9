"""Tables of the JSON fields that transformers, sentence-transformers and PEFT write, and a check of such fields."""

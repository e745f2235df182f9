"""ELMo's two language models of LSTMs; `model.family` is lstms."""

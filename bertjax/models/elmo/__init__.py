"""ELMo: a forward and a backward language model of LSTMs. The value of `model.family` is lstms."""

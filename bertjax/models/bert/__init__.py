"""BERT, GPT and GPT-2. Fields of `BertConfig` such as `causal` and `norm` select the architecture."""

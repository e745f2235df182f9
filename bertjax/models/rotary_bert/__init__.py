"""BERT with rotary positions: the parts that NomicBERT, GTE and Jina Embeddings v3 share."""

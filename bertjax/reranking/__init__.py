"""Rerankers (cross-encoders): training on lists of documents, evaluation, and the ranking of documents for a query."""

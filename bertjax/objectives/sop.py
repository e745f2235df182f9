"""Sentence order: whether two consecutive segments are swapped (ALBERT; Lan et al. 2020, section 3.1)."""

from bertjax.objectives.parts.pairs import telling

OBJECTIVE = telling("sentence order", "order")

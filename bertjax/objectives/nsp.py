"""Next sentence: whether segment B follows segment A, or is a random one (Devlin et al. 2019, section 3.1)."""

from bertjax.objectives.parts.pairs import telling

OBJECTIVE = telling("next sentence", "pairs")

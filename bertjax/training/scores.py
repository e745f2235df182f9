"""The scores of an evaluation."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scores:
    """The results of an evaluation, stored beside its checkpoint.

    Args:
      scores: values by metric name.
      score: the value that ranks checkpoints, higher is better; None if they cannot be ranked.
      measured_on: scores are comparable only if this is equal, such as the sequence length.
      decided: values tuned by the evaluation that predict needs, such as the "no answer" threshold.
      waited: how many evaluations in a row, up to this one, were not better than all before them; the loop counts them.
    """

    scores: dict[str, float | None]
    score: float | None = None
    measured_on: str = ""
    decided: dict[str, float] = dataclasses.field(default_factory=dict)
    waited: int = 0

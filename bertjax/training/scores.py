"""The scores of an evaluation."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scores:
    """The results of an evaluation, stored in the folder of the evaluated checkpoint.

    Args:
      scores: values by metric name.
      score: the value that ranks checkpoints; higher is better. None if the checkpoint cannot be ranked.
      measured_on: a description of the evaluation data, such as the sequence length. Scores are comparable only if
        their descriptions are equal.
      decided: values that the evaluation tunes and that prediction needs, such as the "no answer" threshold.
      waited: the number of evaluations in a row, up to this one, that did not improve the best score. The training loop
        sets this number.
    """

    scores: dict[str, float | None]
    score: float | None = None
    measured_on: str = ""
    decided: dict[str, float] = dataclasses.field(default_factory=dict)
    waited: int = 0

"""The scores of an evaluation."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scores:
    """The results of an evaluation, stored in the folder of the evaluated checkpoint.

    Args:
      scores: {metric: value}; None for an undefined value.
      score: the value that ranks checkpoints, higher is better; None if the checkpoint cannot be ranked.
      measured_on: a description of the data, such as the number and the length of the sequences. Scores are comparable
        only if their descriptions are equal.
      decided: values that the evaluation has tuned and that `predict` needs, such as the "no answer" threshold.
      waited: the number of evaluations in a row, including this evaluation, without a better score than before. The
        training loop sets this field.
    """

    scores: dict[str, float | None]
    score: float | None = None
    measured_on: str = ""
    decided: dict[str, float] = dataclasses.field(default_factory=dict)
    waited: int = 0

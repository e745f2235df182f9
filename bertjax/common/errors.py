"""The exceptions for mistakes that the user can fix."""


class UserError(Exception):
    """A mistake that the user can fix. The commands print its one-line message and exit without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a Jupyter notebook shows for this exception: the message, without a traceback."""
        return [f"{type(self).__name__}: {self}"]


class DamagedWeights(UserError):
    """The weights of the checkpoint compute NaN. No input of the user is wrong."""

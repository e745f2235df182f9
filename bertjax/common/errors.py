"""The exception for mistakes that the user can fix."""


class UserError(Exception):
    """A mistake that the user can fix. The commands print its one-line message and exit without a traceback."""

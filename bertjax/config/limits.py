"""Checks of single fields, each an error that names the field, its value and the remedy."""

from collections.abc import Sequence

from bertjax.common.errors import UserError

AT_LEAST_ONE, AT_LEAST_ZERO, BELOW_ONE = dict(least=1), dict(least=0), dict(least=0, below=1)


def require(ok: bool, field: str, value, remedy: str) -> None:
    """Raises `UserError` unless `ok`."""
    if not ok:
        raise UserError(f"config.{field} = {value!r}: {remedy}")


def one_of(config, field: str, choices: Sequence[str]) -> None:
    """Raises `UserError` unless a field has one of these values."""
    value = value_of(config, field)
    require(value in choices, field, value, f"choose one of {', '.join(choices)}")


def at_least_one(config, *fields: str) -> None:
    """Raises `UserError` unless all of these fields are 1 or more."""
    for field in fields:
        value = value_of(config, field)
        require(value >= 1, field, value, "must be at least 1")


def value_of(config, field: str):
    """Returns the value of a field such as "optimizer.learning_rate"."""
    for name in field.split("."):
        config = config[name]
    return config


def within(field: str, value, role="", choices=(), least=None, most=None, above=None, below=None) -> None:
    """Raises `UserError` for a value outside the limits of `config.field`."""
    del role
    if choices:
        require(value in choices, field, value, f"choose one of {', '.join(choices)}")
    limits = [
        (least, f"at least {least}", lambda: value >= least),
        (above, f"above {above}", lambda: value > above),
        (most, f"at most {most}", lambda: value <= most),
        (below, f"below {below}", lambda: value < below),
    ]
    given = [(said, holds()) for limit, said, holds in limits if limit is not None]
    said = " and ".join(said for said, _ in given)
    require(all(holds for _, holds in given), field, value, f"must be {said}")

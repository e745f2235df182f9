"""Fields of a config that are lists in the form of text: sources, and weights of sources or labels."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import ml_collections

from bertjax.common.errors import UserError


def mixture_of(
    config: ml_collections.ConfigDict, sources: Iterable[str] | None = None, sizes: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Returns `data.mixture` as {source: weight}.

    Args:
      config: the config.
      sources: the names of the sources; None: the sources of `data.corpus`.
      sizes: {source: amount of text}, from which the weight of a source with a share ("30%") is computed; None: the
        weight of such a source is 1.

    Raises:
      UserError: if the mixture is invalid.
    """
    text, names = config.data.mixture, corpus_sources(config) if sources is None else sources
    weights, shares = parse_weights("data.mixture", text, names, "source", "the text", may_be_shares=True)
    if shares and config.data.mix_when != "read":
        raise UserError(
            f"config.data.mixture = {text!r}: shares are taken when records are read; set data.mix_when=read"
        )
    weighted, total_share = (
        [name for name, weight in weights.items() if weight and name not in shares],
        sum(shares.values()),
    )
    if shares and not (total_share < 1 if weighted else math.isclose(total_share, 1)):
        raise UserError(
            f"config.data.mixture = {text!r}: the sum of the shares must be below 100 % if there are sources without a "
            f"share, and 100 % otherwise"
        )
    if sizes is None or not shares:
        return weights
    total = float(sum(sizes.values()))
    if weighted:
        total = sum(weights[source] * sizes.get(source, 0) for source in weighted) / (1 - total_share)
    if not total:
        raise UserError(
            f"config.data.mixture = {text!r}: the records have no source {', '.join(weighted)}; name sources of the "
            f"records"
        )
    return weights | {source: share * total / sizes[source] for source, share in shares.items() if sizes.get(source)}


def parse_weights(
    field: str, text: str, names: Iterable[str], kind: str, owner: str, may_be_shares: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the weights of a field "NAME=WEIGHT,..." by name, and the shares ("30%") by name.

    The weight is 1 for a name that the field does not contain, and for a name with a share.

    Args:
      field: the name of the field.
      text: the value of the field.
      names: all names.
      kind: the kind of the names in a message, such as "source".
      owner: the owner of the names in a message, such as "the text".
      may_be_shares: whether shares are allowed.

    Raises:
      UserError: if the field is invalid.
    """
    weights, shares = dict.fromkeys(names, 1.0), dict[str, float]()
    for part in filter(None, map(str.strip, split_at_commas(text))):
        name, _, weight = part.rpartition("=")
        is_share = may_be_shares and weight.endswith("%")
        try:
            value = float(weight.removesuffix("%") if is_share else weight)
        except ValueError:
            value = -1.0
        if not 0 <= value < math.inf:
            raise UserError(f"config.{field} = {text!r}: write {kind.upper()}=WEIGHT,..., with weights of at least 0")
        if name not in weights:
            known = ", ".join(weights)
            raise UserError(f"config.{field} = {text!r}: {name!r} is not a {kind} of {owner}; choose from {known}")
        weights[name] = 1.0 if is_share else value
        if is_share:
            shares[name] = value / 100
    if weights and not any(weights.values()):
        raise UserError(f"config.{field} = {text!r}: at least one weight must be above 0")
    return weights, shares


def split_at_commas(text: str) -> list[str]:
    r"""Splits a text at its commas, except at `\,`, which stands for a comma."""
    return [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", text)]


def join_with_commas(parts: Iterable[object]) -> str:
    """Joins parts into a text from which `split_at_commas` returns the parts."""
    return ",".join(str(part).replace(",", "\\,") for part in parts)


def corpus_sources(config: ml_collections.ConfigDict) -> tuple[str, ...]:
    r"""Returns `data.corpus` as a tuple. The field is a list, or a string (of a flag) with commas between the sources.

    In a string, `\,` stands for a comma in the name of a source. Raises `UserError` for any other value.
    """
    corpus = config.data.corpus or ()
    parts = split_at_commas(corpus) if isinstance(corpus, str) else corpus
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise UserError(f"config.data.corpus = {corpus!r}: must be a string, or a list of strings")
    return tuple(part.strip() for part in parts if part.strip())

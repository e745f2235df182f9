"""Fields of a config that are lists, written as text: sources, and weights of what they name."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import ml_collections

from bertjax.common.errors import UserError


def mixture_of(
    config: ml_collections.ConfigDict, sources: Iterable[str] | None = None, sizes: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Returns `data.mixture` as {source: weight} for every source, by default those of `data.corpus`.

    Args:
      sizes: how much text each source has, which tells the weight of one whose share of the whole is given ("30%");
        None: such a weight is 1.

    Raises `UserError` if it is invalid.
    """
    text, names = config.data.mixture, corpus_sources(config) if sources is None else sources
    weights, shares = weights_of("data.mixture", text, names, "source", "the text", may_be_shares=True)
    if shares and config.data.mix_when != "read":
        raise UserError(
            f"config.data.mixture = {text!r}: shares are taken when records are read; set data.mix_when=read"
        )
    others = [source for source, weight in weights.items() if weight and source not in shares]
    if shares and not (sum(shares.values()) < 1 if others else math.isclose(sum(shares.values()), 1)):
        raise UserError(f"config.data.mixture = {text!r}: shares must leave some of 100 % to sources without, if any")
    if sizes is None or not shares:
        return weights
    left = 1 - sum(shares.values())
    rest = sum(weights[source] * sizes.get(source, 0) for source in others) / left if others else sum(sizes.values())
    if not rest:
        raise UserError(
            f"config.data.mixture = {text!r}: no records of {', '.join(others)}, of which the rest should be"
        )
    return weights | {source: share * rest / sizes[source] for source, share in shares.items() if sizes.get(source)}


def weights_of(
    field: str, text: str, names: Iterable[str], kind: str, owner: str, may_be_shares: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns a field "NAME=WEIGHT,..." as {name: weight} for every name, and as {name: share} those given as "30%".

    A name that the field does not have weighs 1, and so does one with a share.

    Args:
      kind, owner: what the names are, and of what, for messages.

    Raises `UserError` if it is invalid.
    """
    weights, shares = dict.fromkeys(names, 1.0), {}
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
            has = ", ".join(weights)
            raise UserError(f"config.{field} = {text!r}: {name!r} is no {kind} of {owner}, which has {has}")
        weights[name] = 1.0 if is_share else value
        if is_share:
            shares[name] = value / 100
    if weights and not any(weights.values()):
        raise UserError(f"config.{field} = {text!r}: one weight at least must be above 0")
    return weights, shares


def split_at_commas(text: str) -> list[str]:
    """Splits a text at its commas, except where they are written as `\\,`."""
    return [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", text)]


def join_with_commas(parts: Iterable) -> str:
    """The inverse of `split_at_commas`."""
    return ",".join(str(part).replace(",", "\\,") for part in parts)


def corpus_sources(config: ml_collections.ConfigDict) -> tuple[str, ...]:
    """Returns `data.corpus` as a tuple. It may be a string, several separated by commas (from a flag), or a list.

    In a string, a comma of a source's own is written as `\\,`.
    """
    corpus = config.data.corpus or ()
    parts = split_at_commas(corpus) if isinstance(corpus, str) else corpus
    if not isinstance(parts, Sequence) or not all(isinstance(p, str) for p in parts):
        raise UserError(f"config.data.corpus = {corpus!r}: must be a string, or a list of strings")
    return tuple(p.strip() for p in parts if p.strip())

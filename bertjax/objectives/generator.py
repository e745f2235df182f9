"""The generator of ELECTRA: masked words, by a smaller model, whose guesses take their place in what the encoder reads.

`replaced` says which these are (Clark et al. 2020, section 2). Both are learnt together: "50*replaced + generator".
"""

import dataclasses
import functools

from bertjax.common.errors import UserError
from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, field
from bertjax.models import families
from bertjax.models.family import ProjectsEmbeddings
from bertjax.objectives.mlm import OBJECTIVE as MASKED_WORDS
from bertjax.objectives.objective import Objective
from bertjax.objectives.parsing import parse_objective
from bertjax.objectives.parts import words

NAME = "generator"  # also of its params
OF_WIDTH = ("num_attention_heads", "hidden_size", "intermediate_size")


@dataclasses.dataclass(frozen=True)
class GeneratorSettings:
    """What a generator has of the model beside which it learns: its share of the width (heads, hidden size,
    intermediate size) and of the layers, and whose embeddings, see `parts.generator.Generator`."""

    width: float = field(0.25, above=0, most=1)
    layers: float = field(1.0, above=0, most=1)
    embeddings: str = field("shared", choices=("shared", "apart", "disentangled"))


def config_of(config: BertConfig, settings: GeneratorSettings) -> BertConfig:
    """Returns the config of the generator of a model. Raises `UserError` if a size would be no whole number, or if the
    model's family cannot share its embeddings with a narrower one."""
    shares = dict.fromkeys(OF_WIDTH, "width") | {"num_hidden_layers": "layers"}
    own = {each.name for each in dataclasses.fields(config)}
    changes = {name: _part(config, name, setting, settings) for name, setting in shares.items() if name in own}
    found, size, family = dataclasses.replace(config, **changes), config.embedding_size, families.family_of(config)
    if settings.embeddings == "apart" or found.embedding_size == size:
        return found
    if not isinstance(family, ProjectsEmbeddings):
        raise UserError(
            f"config.objectives.generator.embeddings = {settings.embeddings!r}: a model with model.family = "
            f"{config.family!r} shares no embeddings with a narrower one; set apart, or width=1"
        )
    return family.with_embedding_size(found, size)


def _part(config: BertConfig, name: str, setting: str, settings: GeneratorSettings) -> int:
    share = getattr(settings, setting)
    exact = share * getattr(config, name)
    found = round(exact)
    remedy = f"makes {exact:g} of model.{name} = {getattr(config, name)}; choose one that gives a whole number, above 0"
    require(found > 0 and abs(exact - found) < 1e-2, f"objectives.generator.{setting}", share, remedy)
    return found


def _heads(settings: GeneratorSettings, config, compute) -> dict:
    from bertjax.objectives.parts.generator import Generator

    return {NAME: Generator(config_of(config, settings), compute, settings.embeddings)}


def _rewrite(encoded, weights, keys):
    from bertjax.objectives.parts.generator import rewrite

    return rewrite(encoded, weights, keys)


def _finished(params: dict) -> dict:
    """The encoder with its own embeddings, the generator with all of its params."""
    from bertjax.objectives.parts.generator import joined

    if NAME not in params:
        return params
    encoder, generator = joined(params["bert"], params[NAME])
    return params | {"bert": encoder, NAME: generator}


def _start(settings: GeneratorSettings, params: dict) -> dict:
    """The inverse of `_finished`. Raises `UserError` if they do not share embeddings that they are to share."""
    from bertjax.objectives.parts.generator import parted

    if NAME not in params:
        return params
    try:
        encoder, generator = parted(params["bert"], params[NAME], settings.embeddings)
    except ValueError as error:
        raise UserError(
            f"config.objectives.generator.embeddings = {settings.embeddings!r}: the generator of init_checkpoint "
            f"has {error}"
        ) from None
    return params | {"bert": encoder, NAME: generator}


def _moves(path: tuple[str, ...]) -> tuple[str, ...] | None:
    return ("bert", "embeddings", *path[2:]) if path[:2] == (NAME, "difference") else None


def _flops(settings: GeneratorSettings, config, row) -> int:
    from bertjax.nn.heads import word_flops

    own = config_of(config, settings)
    return families.family_of(own).forward_flops(own, row.tokens) + word_flops(own, row.predictions)


def _validate(settings: GeneratorSettings, config) -> None:
    MASKED_WORDS.validate(config)
    names = [term.name for term in parse_objective(config)]
    remedy = "nothing would read the words of the generator: write '50*replaced + generator'"
    require("replaced" in names, "objective", config.objective, remedy)
    own = config_of(families.config_of(config), settings)
    _validate_model(config, settings, own)
    windows = config.eval.bits_windows
    require(not windows, "eval.bits_windows", windows, "a model that tells replaced words predicts none; set 0")


def _validate_model(config, settings: GeneratorSettings, own: BertConfig) -> None:
    """Raises `UserError` for a generator that its family does not allow."""
    narrow = config.copy_and_resolve_references().unlock()
    narrow.model.update({name: value for name, value in vars(own).items() if name in narrow.model and name != "family"})
    try:
        families.family_of(families.config_of(config)).validate(narrow)
    except UserError as error:
        reason = str(error).removeprefix("config.")
        raise UserError(
            f"config.objectives.generator.width = {settings.width}: the generator would have {reason}"
        ) from None


DISENTANGLED = (
    "from whose embeddings those of the model differ; have it learn both, or set objectives.generator.embeddings=shared"
)


def _make(settings: GeneratorSettings) -> Objective:
    return dataclasses.replace(
        MASKED_WORDS,
        loss=None,
        rewrite=_rewrite,
        heads=functools.partial(_heads, settings),
        report=functools.partial(words.report, "masked words by the generator"),
        flops=functools.partial(_flops, settings),
        validate=functools.partial(_validate, settings),
        models=lambda config: {NAME: config_of(config, settings)},
        finished=_finished,
        start=functools.partial(_start, settings),
        moves=_moves,
        in_all_stages=DISENTANGLED if settings.embeddings == "disentangled" else "",
        fills_masks=False,
    )


OBJECTIVE = dataclasses.replace(_make(GeneratorSettings()), settings=GeneratorSettings, made=_make)

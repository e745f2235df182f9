"""Families of models: BERT, ModernBERT, EuroBERT, Transformer-XL, the two LSTMs of ELMo, or somebody else's. What the
package wants to know about a model, it asks its family.

A family is a file or a folder, found by the name in `config.model.family`. It is made of the parts in `model/`, which
know no family, and its module is imported without JAX's modules, which its functions import when they are called.
"""

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import ml_collections
import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry, own_in_folders
from bertjax.config.model_config import BertConfig, Compute
from bertjax.text.tokenizer import SPECIAL_PIECES

if TYPE_CHECKING:
    import flax.linen as nn
    import jax


def layers_by_name(config: BertConfig, path: tuple[str, ...]) -> np.ndarray | None:
    """Returns the layers of a param by its name, see `Family.layer_numbers`: all those of an array in `layers`, the
    fifth of one in `NAME_4`, and 0 of one in `embeddings`."""
    if path[0] == "embeddings":
        return np.array(0)
    if "layers" in path:
        return 1 + np.arange(config.num_hidden_layers)
    found = next(filter(None, (re.fullmatch(r".*_(\d+)", name) for name in path)), None)
    return np.array(1 + int(found[1])) if found else None


@dataclasses.dataclass(frozen=True)
class Family:
    """What the package asks about a family.

    Args:
      model: (config, compute) -> the encoder, a `model.encoder_model.EncoderModel` or a module with its methods.
      words: config -> how it can learn words. masked: it fills in those that are hidden; next: each token sees those
        before it, and predicts the next; neighbours: some states see those before, others those after; permuted: it
        predicts words from any others that it is shown, see `EncoderModel.encode_permuted`.
      layer_flops: (config, tokens of a row) -> matrix-multiply FLOPs of its layers for one row, forwards.
      query_flops: (config, tokens of a row, words) -> those of the states that predict permuted words, besides.
      shown: params of a model -> {field of its config: the values that it may have} as far as the params show it; None
        if they are another family's.
      validate: whole config -> None. Raises `UserError` for what this family cannot do.
      attention: (config, params of the encoder, token ids `[1, length]`, segments, of which 0 is padding, token types)
        -> probabilities `[layers, heads, queries, keys]`, a function that can be compiled; None if it has no attention
        to show.
      new_cache: (config, batch, tokens, dtype) -> an empty cache, with which the encoder's `decode` continues a text;
        None if it cannot.
      new_memory: (config, rows, dtype) -> what rows remember that have read nothing, a `model.recurrence.Memory`, with
        which the encoder's `encode`, or if words are permuted `encode_permuted`, returns what they then remember: the
        last `memory_length` states of each layer, a field of the config; None if its models have no memory.
      memory_flops: (config, tokens of a row) -> what a full memory adds to `layer_flops`.
      word_embeddings: path of the word embeddings among the params of the encoder.
      is_cast: path of a param -> whether the compute type may replace its float32 without changing a result.
      model_types: the `model_type`s in config.json of Hugging Face's folders whose models are of this family.
      huggingface: the module that reads and writes them, with the functions of `families.bert.huggingface`.
      layer_numbers: (config, path of a param of the encoder) -> the number of the layer that it is of, from 1 on, or
        `[layers]`, ascending, of those that an array stacks on its first axis; 0 before the layers, None after them.
      start: params of a checkpoint -> those that another run starts from.
      projected: (config, size) -> the config of a model like it, whose embeddings have this size and are projected to
        that of hidden states; None: there is none.
      special_pieces: the names of these in a SentencePiece model that is learnt for it, see `text.learning.learn`.
      packs: whether several sequences can share a row, each as a segment with positions of its own.
      has_kernels: whether its attention runs as a kernel on chips that have one.
      config: a frozen dataclass of `config.field`s, which say their limits. Names are those of `BertConfig` where the
        parts read them.
    """

    model: Callable[[BertConfig, Compute], "nn.Module"]
    words: Callable[[BertConfig], str]
    layer_flops: Callable[[BertConfig, int], int]
    shown: Callable[[dict], Mapping[str, Sequence] | None]
    query_flops: Callable[[BertConfig, int, int], int] | None = None
    validate: Callable[[Any], None] = lambda config: None
    attention: Callable[[BertConfig, dict, "jax.Array", "jax.Array", "jax.Array"], "jax.Array"] | None = None
    new_cache: Callable[[BertConfig, int, int, str], Any] | None = None
    new_memory: Callable[[BertConfig, int, str], Any] | None = None
    memory_flops: Callable[[BertConfig, int], int] = lambda config, length: 0
    word_embeddings: tuple[str, ...] = ("embeddings", "word", "embedding")
    is_cast: Callable[[tuple[str, ...]], bool] = lambda path: path[-1] in ("kernel", "embedding")
    model_types: tuple[str, ...] = ()
    huggingface: str = ""
    layer_numbers: Callable[[Any, tuple[str, ...]], np.ndarray | None] = layers_by_name
    start: Callable[[dict], dict] = lambda params: params
    projected: Callable[[Any, int], Any] | None = None
    special_pieces: tuple[str, ...] = SPECIAL_PIECES
    packs: bool = False
    has_kernels: bool = True
    config: type = BertConfig


FAMILIES: Registry[Family] = Registry(
    "family",
    "model.family",
    own_in_folders(__package__, __file__, "family", "FAMILY", renamed={"elmo": "lstms"}),
    plural="families",
)
register = FAMILIES.register


def of(config: BertConfig) -> Family:
    """Returns the family of a model's config."""
    return FAMILIES.get(config.family)


def config_of(config) -> BertConfig:
    """Returns the model's config of a whole config."""
    family = FAMILIES.get(config.model.family)
    others = all_fields() - _names(family) if is_adopted(config) else ()
    return family.config(**{name: value for name, value in config.model.items() if name not in others})


def model_fields(family: str, **fields) -> ml_collections.ConfigDict:
    """Returns `config.model` for a family: its defaults, and these fields."""
    return ml_collections.ConfigDict(dataclasses.asdict(FAMILIES.get(family).config(family=family, **fields)))


def is_adopted(config) -> bool:
    """Whether the model is that of `init_checkpoint`, which is read later: in fine-tuning, and with `adapt.model`."""
    return "stages" not in config or config.adapt.model


def configs_that_may_be(config) -> list[type]:
    """Returns the class of the model's config, or those of all families if the model `is_adopted`."""
    return [each.config for each in (_loaded().values() if is_adopted(config) else [FAMILIES.get(config.model.family)])]


def add_field(config, name: str) -> None:
    """Adds a field that models of another family have to `config.model` of a run whose model `is_adopted`, with its
    default there. Does nothing if no family has the field."""
    if name in all_fields():
        with config.model.unlocked():
            config.model[name] = default_of(name)


def default_of(name: str):
    """Returns the default of a field that models of a family have, the first of several."""
    return next(getattr(family.config(), name) for family in _loaded().values() if name in _names(family))


def all_fields() -> set[str]:
    """Returns the names of the fields of all families."""
    return {name for family in _loaded().values() for name in _names(family)}


def _names(family: Family) -> set[str]:
    return {each.name for each in dataclasses.fields(family.config)}


def _loaded() -> dict[str, Family]:
    """Returns the families by their names, without entry points that do not load."""
    found = {}
    for name in FAMILIES.names():
        with contextlib.suppress(UserError):
            found[name] = FAMILIES.get(name)
    return found


def by_model_type() -> dict[str, Family]:
    """Returns the families by the `model_type`s that they read."""
    return {kind: family for family in _loaded().values() for kind in family.model_types}


def module_of(family: Family) -> ModuleType:
    """Returns the module that reads and writes Hugging Face's folders of a family."""
    return importlib.import_module(family.huggingface)


def projection_flops(config: BertConfig, tokens: int) -> int:
    """Matrix-multiply FLOPs that bring embeddings to the size of hidden states, if theirs is another, forwards."""
    size, hidden = config.embedding_size, config.hidden_size
    return 2 * tokens * size * hidden if size != hidden else 0


def value_at(params: Mapping, path: Sequence[str]):
    """Returns the param at a path."""
    for name in path:
        params = params[name]
    return params


def shown_by_embeddings(params: dict) -> dict[str, Sequence]:
    """Returns what the params of a model with `model.encoder.Embeddings` show of its config, see `Family.shown`."""
    embeddings = params["bert"]["embeddings"]
    rows, hidden = embeddings["word"]["embedding"].shape
    if "projection" in embeddings:
        hidden = len(embeddings["projection"]["bias"])
    found: dict[str, Sequence] = {
        "positions": ("learned",) if "position" in embeddings else ("sinusoidal", "none"),
        "norm": ("post",) if "norm" in embeddings else ("pre",),
        "hidden_size": (hidden,),
        "type_vocab_size": (len(embeddings["token_type"]["embedding"]) if "token_type" in embeddings else 0,),
        "vocab_size": range(rows, rows - 128, -1),  # padded
    }
    if "masked_lm" in params:
        found["output"] = ("transform",)
    if "position" in embeddings:
        found["max_position_embeddings"] = (len(embeddings["position"]["embedding"]),)
    return found


def layer_numbers(config: BertConfig, path: tuple[str, ...]) -> np.ndarray | None:
    """Returns the layers of a param of a model that has an encoder as `bert`, see `Family.layer_numbers`."""
    return of(config).layer_numbers(config, path[1:]) if path[0] == "bert" else None


def words(config) -> str:
    """Returns how pre-training with a whole config learns words, see `Family.words`."""
    return FAMILIES.get(config.model.family).words(config_of(config))

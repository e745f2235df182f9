"""The interface of a model family: an abstract base class, and a class for each ability that only some families have.

A family is a subclass of `ModelFamily` and of the classes of its abilities. Callers test for an ability with
`isinstance(family, Ability)`. This module imports no JAX, so that `bertjax --help` stays fast.
"""

import abc
import functools
import importlib
import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from bertjax.config.model_config import BertConfig, Compute

if TYPE_CHECKING:
    import jax

    from bertjax.models.huggingface_format import HuggingFaceFormat
    from bertjax.nn.encoder_model import EncoderModel
    from bertjax.nn.heads import WordHead
    from bertjax.nn.ops.plain_attention import KeyValueCache
    from bertjax.nn.ops.recurrent_memory import RecurrentMemory

# The language-modelling objectives of encoders.
# masked: predict masked tokens from the tokens on both sides.
# causal: predict the next token from the tokens before it.
# bidirectional: one half of a hidden state predicts the next token, the other half predicts the previous token (ELMo).
# permuted: predict tokens in a random order of factorization (XLNet); the encoder has the method `encode_permuted`.
LmType = Literal["masked", "causal", "bidirectional", "permuted"]
# The path of the word embeddings in the params of an encoder. All families use this path.
WORD_EMBEDDINGS = ("embeddings", "word", "embedding")


class ModelFamily(abc.ABC):
    """Builds the encoders of one architecture, and derives FLOPs, layers and config fields from configs and params.

    Register an instance with `bertjax.models.register`. A family has no state: the instance serves all models of the
    family. The argument `config` of a method is the model config, an instance of `config_class`.

    Attributes:
      config_class: a frozen dataclass of `config.model_config.field`s, which contain the limits of their values.
      supports_packing: whether several sequences can share a row. A packed sequence is a segment, and its positions
        start at 0.
      has_kernels: whether a kernel for TPUs or GPUs can compute the attention of the family.
    """

    config_class: type = BertConfig
    supports_packing: bool = False
    has_kernels: bool = True

    @abc.abstractmethod
    def build(self, config: Any, compute: Compute) -> "EncoderModel":
        """Returns the encoder: an unbound Flax module.

        Import the modules here and not at the top of the file, because the registry imports families without JAX.

        Args:
          config: the model config.
          compute: the settings of the computation: dtype, rematerialization, kernels and low-rank updates.

        Returns:
          An instance `Model(config, compute)` of a subclass of `bertjax.nn.encoder_model.EncoderModel`. The subclass
          overrides `make_layers`, which returns the layers as a module. The layers are called as
          `layers(x, segments, dropout_keys, every_layer=False)` with the embeddings `x` `[rows, length, hidden]`, the
          int32 array `segments` `[rows, length]`, and random keys `[rows]`. `dropout_keys` is None without dropout.
          Tokens attend only to tokens with the same number in `segments`; 0 is padding. The layers return the hidden
          states of the last layer `[rows, length, hidden]`, or with `every_layer` the hidden states of all layers
          `[layers, rows, length, hidden]`. Params are float32.
        """

    @abc.abstractmethod
    def forward_flops(self, config: Any, length: int) -> int:
        """Returns the FLOPs of the matrix products in the layers, for the forward pass of one row of a batch.

        A multiply-add counts as two FLOPs. Heads and the recurrent memory are not included.

        Args:
          config: the model config.
          length: the length of the row in tokens, with padding.
        """

    @abc.abstractmethod
    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that the shapes or the names of params determine.

        The reader of a checkpoint raises an error if config.json has a value that is not among the possible values.
        `models.infer_embeddings_config` returns the fields of the embeddings of BERT.

        Args:
          params: a nested dict of the arrays of a model. `params["bert"]` are the params of the encoder, the other keys
            are heads.

        Returns:
          {name of a field: the possible values}, such as `{"num_hidden_layers": (12,)}`; None if the params belong to
          another family.
        """

    def lm_type(self, config: Any) -> LmType:
        """Returns the language-modelling objective of the encoder.

        Args:
          config: the model config.

        Returns:
          "masked": predicts masked tokens from the tokens on both sides. "causal": predicts the next token from the
          tokens before it. "bidirectional": one half of a hidden state predicts the next token, the other half predicts
          the previous token (ELMo). "permuted": predicts tokens in a random order of factorization (XLNet).
        """
        return "masked"

    def layer_ids(self, config: Any, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer numbers of a param, for layer-wise learning rates and for frozen layers.

        The default expects layers that are stacked in `layers`, or numbered from 0 as in `dense_3`.

        Args:
          config: the model config.
          path: the path of a param in the params of the encoder, such as `("encoder", "layers", "output", "kernel")`.

        Returns:
          An integer array. Its shape is `[]` for a param of one layer: 0 for the embeddings, 1 for the first layer. Its
          shape is `[layers]`, ascending, for a param that stacks all layers on its first axis. None for a param after
          the last layer, such as a pooler.
        """
        if path[0] == "embeddings":
            return np.array(0)
        if "layers" in path:
            return 1 + np.arange(config.num_hidden_layers)
        number = next(filter(None, (re.fullmatch(r".*_(\d+)", name) for name in path)), None)
        return np.array(1 + int(number[1])) if number else None

    def word_head(self, config: Any) -> "WordHead":
        """Returns the choices of the head that predicts words.

        The default is BERT's head: a dense layer, an activation and a LayerNorm; the logits have a bias. With the value
        "plain" of the field `output`, the head is the tied decoder only.

        Args:
          config: the model config.
        """
        from bertjax.nn.heads import word_head_of

        return word_head_of(config)

    def stack_layers(self, config: Any, layers: Sequence[dict]) -> dict:
        """Returns the params of the encoder's layers, from the params of each layer.

        The default stacks all layers under the name `layers`.

        Args:
          config: the model config.
          layers: the params of each layer, with equal names and shapes.
        """
        import jax

        return {"layers": jax.tree.map(lambda *arrays: np.stack(arrays), *layers)}

    def unstack_layers(self, config: Any, encoder: dict) -> list[dict]:
        """Returns the params of each layer, in order. The inverse of `stack_layers`.

        Args:
          config: the model config.
          encoder: the params of the encoder.
        """
        import jax

        count = config.num_hidden_layers
        return [jax.tree.map(lambda x, number=number: x[number], encoder["layers"]) for number in range(count)]

    def validate(self, config: Any) -> None:  # noqa: B027 (most families check nothing)
        """Checks fields of a config that depend on each other. The limits of single fields are already checked.

        Args:
          config: the `ConfigDict` of a run; `config.model` has the fields of the model config.

        Raises:
          UserError: if the family does not support the config. The message has the field, its value and the fix.
        """


class Decodes:
    """An ability: generate text with cached keys and values. Callers use the ability only if `lm_type` is causal.

    The encoder has the method `decode(input_ids, positions, cache)` for tokens that follow the tokens in the cache.
    `input_ids` is `[batch, length]`, and `positions` `[length]` are consecutive and equal in all rows. The method
    returns the hidden states `[batch, length, hidden]` and the cache with the new tokens.
    """

    def new_cache(self, config: Any, batch: int, length: int, dtype: str) -> "KeyValueCache":
        """Returns an empty cache for `decode`.

        Args:
          config: the model config.
          batch: the number of texts.
          length: the maximum number of tokens in a text.
          dtype: the name of the dtype of keys and values, such as "float32".

        Returns:
          A `KeyValueCache`: keys and values of zeros, each `[layers, batch, length, heads, head size]`.
        """
        import jax.numpy as jnp

        from bertjax.nn.ops.plain_attention import KeyValueCache

        shape = (config.num_hidden_layers, batch, length, config.num_attention_heads, config.head_size)
        return KeyValueCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class ExposesAttention:
    """An ability: return attention probabilities, which the report plots.

    The encoder has the method `attention_probabilities(params, ids, segments, token_types)`, which the default calls on
    an unbound encoder. The arguments and the result are those of the method of the family, without `config`.
    """

    def attention_probabilities(
        self, config: Any, params: dict, ids: "jax.Array", segments: "jax.Array", token_types: "jax.Array"
    ) -> "jax.Array":
        """Returns the attention probabilities of one text. Callers compile the method with `jax.jit`.

        Args:
          config: the model config.
          params: the params of the encoder.
          ids: int32 token ids `[1, length]`.
          segments: int32 `[1, length]`; 1 for a token, 0 for padding.
          token_types: int32 `[1, length]`; 0 in sentence A, 1 in sentence B.

        Returns:
          Probabilities `[layers, heads, length, length]`, of the queries on the third axis and the keys on the last
          axis. The sum over the keys is 1.
        """
        encoder = cast(Any, self).build(config, Compute())
        return encoder.attention_probabilities(params, ids, segments, token_types)


class Recurrent:
    """An ability: layers read the hidden states of earlier tokens from a memory (segment recurrence).

    The model config has the field `memory_length`, in tokens. The method `encode` of the encoder has the argument
    `memory`, a `RecurrentMemory` or None. With a memory, `encode` returns the hidden states and the next memory: the
    last `memory_length` inputs of each layer. If `lm_type` is permuted, this applies to `encode_permuted` instead.
    """

    def new_memory(self, config: Any, rows: int, dtype: str) -> "RecurrentMemory":
        """Returns an empty memory.

        Args:
          config: the model config.
          rows: the number of rows in a batch.
          dtype: the name of the dtype of the hidden states, such as "bfloat16".

        Returns:
          A `RecurrentMemory`: `states` `[rows, layers, memory_length, hidden]`, and `filled` int32 `[rows]`, the
          number of valid states, which is 0.
        """
        from bertjax.nn.ops.recurrent_memory import new_memory

        return new_memory(rows, config.num_hidden_layers, config.memory_length, config.hidden_size, dtype)

    def memory_reach(self, config: Any, length: int) -> int:
        """Returns the number of earlier training steps that influence the memory.

        The memory of a layer depends on the memory of the layer below. The number of steps therefore grows with the
        number of layers. If a checkpoint contains no memory, the resumed run computes the memory from the batches of
        these steps.

        Args:
          config: the model config.
          length: the row length in tokens. If stages have different row lengths, the shortest one.
        """
        return config.num_hidden_layers * math.ceil(config.memory_length / length)

    def memory_flops(self, config: Any, length: int) -> int:
        """Returns the FLOPs that a full memory adds to `forward_flops` for one row.

        The default counts relative attention.

        Args:
          config: the model config.
          length: the length of the row in tokens, without the memory.
        """
        hidden, memory = config.hidden_size, config.memory_length
        keys_and_values = 2 * memory * hidden * hidden
        attention = 3 * length * memory * hidden  # content scores, position scores, and weighted values
        return 2 * config.num_hidden_layers * (keys_and_values + attention)


class TwoStreamAttention(abc.ABC):
    """An ability: two-stream attention (XLNet). The encoder implements `EncoderModel.encode_permuted`.

    The second stream is the query stream: its state at a position does not attend to the token at this position.
    """

    @abc.abstractmethod
    def query_flops(self, config: Any, length: int, queries: int) -> int:
        """Returns the FLOPs of the matrix products of the query stream, for the forward pass of one row.

        Args:
          config: the model config.
          length: the length of the row in tokens.
          queries: the number of hidden states of the row in the query stream.
        """


class PositionCompensation:
    """An ability: masked and permuted language modelling (MPNet), with masks that have the positions of other tokens.

    The encoder has the method `encode_compensated`, which `TransformerModel` implements. The positions must come from
    `LearnedPositions`, `SinusoidalPositions`, `Rotary` or a `ScoreBias`. All layers must have the attention of
    `nn.attention.Attention`, without windows.
    """

    def compensated_flops(self, config: Any, length: int, predictions: int) -> int:
        """Returns the FLOPs of the matrix products in the layers, for the forward pass of one row.

        Args:
          config: the model config.
          length: the length of the row in tokens.
          predictions: the number of predicted tokens of the row. Each has a mask and a state of the second stream.
        """
        states = length + 2 * predictions
        # No state attends to the second stream: neither scores nor weighted values.
        unused = 2 * 2 * config.num_hidden_layers * states * predictions * config.hidden_size
        return cast(Any, self).forward_flops(config, states) - unused


class ProjectsEmbeddings(abc.ABC):
    """An ability: word embeddings whose size differs from the hidden size, with a projection.

    A narrow generator can share the word embeddings of a wide discriminator (ELECTRA).
    """

    @abc.abstractmethod
    def with_embedding_size(self, config: Any, size: int) -> Any:
        """Returns the config of a model with another size of the word embeddings, and the same hidden size.

        Args:
          config: the model config, which is not changed.
          size: the size of a word embedding, in numbers.
        """


class HuggingFaceFamily:
    """An ability: read and write model folders of Hugging Face transformers.

    Attributes:
      model_types: the values of `model_type` in config.json for this family, such as ("modernbert",).
    """

    model_types: tuple[str, ...]

    @property
    def huggingface(self) -> "HuggingFaceFormat":
        """The format, which reads and writes the folders: `FORMAT` of the module `huggingface` beside the family.

        A family without such a module has the format of its base class.
        """
        packages = tuple(base.__module__.rpartition(".")[0] for base in type(self).__mro__)
        return importlib.import_module(_format_module(packages)).FORMAT


@functools.cache
def _format_module(packages: tuple[str, ...]) -> str:
    """Returns the name of the module `huggingface` in the first of some packages that contains it."""
    names = (f"{package}.huggingface" for package in packages if package)
    return next(name for name in names if importlib.util.find_spec(name))


class NamesSpecialTokens(abc.ABC):
    """An ability: name the special tokens of a new SentencePiece vocabulary as the published models do.

    Attributes:
      special_tokens: the names of the tokens that have the roles [PAD], [UNK], [CLS], [SEP] and [MASK], in this order.
    """

    special_tokens: tuple[str, ...]


class ImportsParams(abc.ABC):
    """An ability: convert the params of `init_checkpoint` before a run starts from them."""

    @abc.abstractmethod
    def import_params(self, params: dict) -> dict:
        """Returns the initial params of a run. Params that the run lacks are ignored.

        Args:
          params: the params of a checkpoint, a nested dict of NumPy arrays, which is not changed. `params["bert"]` are
            the params of the encoder, the other keys are heads.
        """


def projection_flops(config: Any, tokens: int) -> int:
    """Returns the FLOPs of the projection from the embedding size to the hidden size; 0 without a projection."""
    return 2 * tokens * config.embedding_size * config.hidden_size if config.projects_embeddings else 0


def param_at(params: Mapping, path: Sequence[str]) -> Any:
    """Returns the param at a path."""
    for name in path:
        params = params[name]
    return params


def possible_vocab_sizes(params: dict) -> Sequence[int]:
    """Returns the possible vocabulary sizes. The word embeddings are padded to a multiple of 128 rows."""
    rows = len(param_at(params["bert"], WORD_EMBEDDINGS))
    return range(rows, rows - 128, -1)


def infer_embeddings_config(params: dict) -> dict[str, Sequence]:
    """Returns the config fields that the params of BERT's embeddings determine, see `ModelFamily.infer_config`.

    Args:
      params: the params of a model with `nn.embeddings.TokenEmbeddings`.
    """
    embeddings = params["bert"]["embeddings"]
    hidden = embeddings["word"]["embedding"].shape[1]
    if "projection" in embeddings:
        hidden = len(embeddings["projection"]["bias"])
    fields: dict[str, Sequence] = {
        "positions": ("learned",) if "position" in embeddings else ("sinusoidal", "none"),
        "norm": ("post",) if "norm" in embeddings else ("pre",),
        "hidden_size": (hidden,),
        "type_vocab_size": (len(embeddings["token_type"]["embedding"]) if "token_type" in embeddings else 0,),
        "vocab_size": possible_vocab_sizes(params),
    }
    if "masked_lm" in params:
        fields["output"] = ("transform",)
    if "position" in embeddings:
        fields["max_position_embeddings"] = (len(embeddings["position"]["embedding"]),)
    return fields

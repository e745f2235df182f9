"""The config of a model: fields with limits, the config of BERT, published sizes, and settings of the computation."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any, ClassVar

import ml_collections

from bertjax.common.errors import UserError


def field(default: Any, role: str = "", **limits: Any) -> Any:
    """Returns a field of a model config.

    Args:
      default: the default of the field.
      role: the role of the field in a checkpoint. size: the shapes of params depend on the field. form: the names of
        params depend on the field. behaviour: a checkpoint determines the field in another way. choice: a run may
        change the value of the checkpoint. "": no role.
      **limits: `choices`, or `least`, `most`, `above` and `below`.
    """
    return dataclasses.field(default=default, metadata={"role": role, **limits})


def size(default: int, most: int = 2**31 - 1) -> Any:
    """Returns a field of the role size, an integer from 1 to `most`."""
    return field(default, "size", least=1, most=most)


def fields_with_roles(model: Any, *roles: str) -> tuple[str, ...]:
    """Returns the names of the fields with the given roles, of a model config or of a config class."""
    fields = dataclasses.fields(model)
    return tuple(field.name for role in roles for field in fields if field.metadata["role"] == role)


def dropout_fields(model: ml_collections.ConfigDict) -> list[str]:
    """Returns the names of the dropout rates in `config.model`, for any family."""
    return [name for name in model if "dropout" in name]


class ModelConfig:
    """The base class of the model configs of all families. `nn/` reads these attributes.

    A property has the value of most families. The config of another family overrides the property by a field.
    """

    attention_output_dropout: ClassVar[bool] = True  # dropout of the sum of attention and its input

    if TYPE_CHECKING:  # each family has these attributes, as fields or as constants

        @property
        def family(self) -> str:
            """The name of the family."""

        @property
        def vocab_size(self) -> int:
            """Tokens of the vocabulary."""

        @property
        def hidden_size(self) -> int:
            """The size of hidden states."""

        @property
        def num_hidden_layers(self) -> int:
            """The number of layers."""

        @property
        def num_attention_heads(self) -> int:
            """Heads of a layer."""

        @property
        def intermediate_size(self) -> int:
            """The width of feed-forward layers."""

        @property
        def max_position_embeddings(self) -> int:
            """The length of the longest sequence."""

        @property
        def type_vocab_size(self) -> int:
            """The number of token types."""

        @property
        def hidden_act(self) -> str:
            """The activation of feed-forward layers."""

        @property
        def hidden_dropout_prob(self) -> float:
            """The dropout rate of sums and heads."""

        @property
        def initializer_range(self) -> float:
            """The standard deviation of initial values."""

    @property
    def output(self) -> str:
        """The head for words of BERT: transform or plain, see `BertConfig.output`."""
        return "transform"

    @property
    def position_offset(self) -> int:
        """Rows of the table of positions before the row of the first token."""
        return 0

    @property
    def bias(self) -> bool:
        """Whether dense layers and norms have a bias."""
        return True

    @property
    def output_init_scale(self) -> float:
        """A factor of the initial values of matrices that add to the residual sum."""
        return 1.0

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the head for words uses the word embeddings."""
        return True

    @property
    def spans_dropout_prob(self) -> float:
        """The dropout before the head for spans; 0 as in run_squad.create_model."""
        return 0.0

    @property
    def pooled_dropout_prob(self) -> float:
        """The dropout before a classifier of pooled outputs."""
        return self.hidden_dropout_prob

    @property
    def embedding_size(self) -> int:
        """The size of embeddings. If it differs from the hidden size, embeddings are projected."""
        return self.hidden_size

    @property
    def projects_embeddings(self) -> bool:
        """Whether a dense layer maps the embeddings to the hidden size."""
        return self.embedding_size != self.hidden_size

    @property
    def head_size(self) -> int:
        """The size of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """The rows of the word embedding table."""
        return pad_to_lanes(self.vocab_size)


@dataclasses.dataclass(frozen=True)
class BertConfig(ModelConfig):
    """The architecture of a BERT model. Fields have the names of `bert_config.json` and of config.json."""

    vocab_size: int = size(30522)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(12, most=1000)  # a damaged file may contain any number
    num_attention_heads: int = size(12)
    intermediate_size: int = size(3072)
    # gelu_new is the tanh form, as in Google's modeling.py; gelu is the erf form, as in Hugging Face's classes.
    hidden_act: str = field("gelu_new", "behaviour", choices=("gelu", "gelu_new", "relu"))
    hidden_dropout_prob: float = field(0.1, least=0, below=1)
    attention_probs_dropout_prob: float = field(0.1, least=0, below=1)
    max_position_embeddings: int = size(512)
    type_vocab_size: int = size(2)
    initializer_range: float = field(0.02, above=0, below=1)
    layer_norm_eps: float = field(1e-12, "behaviour", above=0, below=1)
    # auto: chosen by chip and length; xla: compiled from plain operations; fused: a kernel, if the chip has one.
    attention: str = field("auto", choices=("auto", "xla", "fused"))
    # Fields in which BERT differs from other models. The defaults describe BERT.
    family: str = field("bert", "form")  # see `models.families`
    causal: bool = field(False, "choice")  # tokens attend to earlier tokens only, and predict the next token
    # sinusoidal: as in the original Transformer; each_layer: a learned table for each layer.
    positions: str = field("learned", "form", choices=("learned", "sinusoidal", "none", "each_layer"))
    norm: str = field("post", "form", choices=("post", "pre"))  # LayerNorm after each sum; before each part (GPT-2)
    # The head for words. transform: dense, activation, LayerNorm, then the embeddings and a bias; plain: the
    # embeddings (GPT).
    output: str = field("transform", "form", choices=("transform", "plain"))


def pad_to_lanes(vocab_size: int) -> int:
    """Rounds the size of a vocabulary up to a multiple of 128, the lanes of a TPU."""
    return -(-vocab_size // 128) * 128


@dataclasses.dataclass(frozen=True)
class Lora:
    """The kernels with low-rank updates, see `nn.ops.low_rank`. Fields as in `config.lora`."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of the updates."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Compute:
    """Settings of the computation. Only `lora` changes results by more than rounding."""

    dtype: str = "float32"  # dtype of activations; params are float32
    product_dtype: str = "float32"  # dtype of the factors of matrix products; sums are float32
    remat: str = "none"  # see `common_config`
    unroll: bool = False  # see `common_config`; with remat "none" only
    chip: str = ""  # `device_kind` of the devices, for kernels; empty: no kernels
    lora: Lora | None = None

    @property
    def casts_factors(self) -> bool:
        """Whether factors of matrix products have another dtype than activations."""
        return self.product_dtype != self.dtype


# (layers, hidden size, heads). base and large: Devlin et al. 2019, section 3; tiny to medium: Turc et al. 2019, table
# 1; gpt: Radford et al. 2018, section 4.1; gpt2: Radford et al. 2019, table 2.
SIZES = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
    "gpt": (12, 768, 12),
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}


def model_size(name: str) -> dict[str, int]:
    """Returns the `config.model` fields of a published size, or of LAYERS-HIDDEN-HEADS, such as 12-768-12.

    Raises `UserError` for any other name.
    """
    numbers = SIZES.get(name) or (tuple(map(int, name.split("-"))) if re.fullmatch(r"\d+-\d+-\d+", name) else None)
    if numbers is None:
        raise UserError(f"unknown model size {name!r}: choose one of {', '.join(SIZES)}, or LAYERS-HIDDEN-HEADS")
    layers, hidden, heads = numbers
    return dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden)

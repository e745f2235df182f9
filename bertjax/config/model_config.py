"""The config of a model: its fields with their limits, BERT's config, published sizes, and how a model computes."""

import dataclasses
import re
from typing import TYPE_CHECKING, ClassVar

import ml_collections

from bertjax.common.errors import UserError


def field(default, role: str = "", **limits):
    """Returns a field of a model's config, with all that is known about it.

    Args:
      role: the part that the field has in a checkpoint. size: the shapes of params depend on the field. form: the names
        of params depend on it. behaviour: a checkpoint determines it in another way. choice: a run may differ from the
        checkpoint that it starts from. "": none of these.
      limits: `choices`, or `least`, `most`, `above` and `below`.
    """
    return dataclasses.field(default=default, metadata={"role": role, **limits})


def size(default: int, most: int = 2**31 - 1) -> int:
    return field(default, "size", least=1, most=most)


def fields_of(model, *roles: str) -> tuple[str, ...]:
    """Returns the names of the fields of a model's config, or of its class, that have one of these roles."""
    return tuple(each.name for role in roles for each in dataclasses.fields(model) if each.metadata["role"] == role)


def dropout_fields(model: ml_collections.ConfigDict) -> list[str]:
    """Returns the names of the dropout rates in `config.model`, whichever its family has."""
    return [name for name in model if "dropout" in name]


class ModelConfig:
    """The base class of the model configs of all families. `nn/` reads these attributes.

    A property has the value of most families. The config of another family overrides the property by a field.
    """

    attention_output_dropout: ClassVar[bool] = True  # dropout of the sum of attention and its input

    if TYPE_CHECKING:  # Each family has these attributes, as fields or as constants.

        @property
        def family(self) -> str: ...
        @property
        def vocab_size(self) -> int: ...
        @property
        def hidden_size(self) -> int: ...
        @property
        def num_hidden_layers(self) -> int: ...
        @property
        def num_attention_heads(self) -> int: ...
        @property
        def intermediate_size(self) -> int: ...
        @property
        def max_position_embeddings(self) -> int: ...
        @property
        def type_vocab_size(self) -> int: ...
        @property
        def hidden_act(self) -> str: ...
        @property
        def hidden_dropout_prob(self) -> float: ...
        @property
        def initializer_range(self) -> float: ...
        @property
        def output(self) -> str: ...

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
        """Whether the output layer for words uses the word embeddings."""
        return True

    @property
    def spans_dropout_prob(self) -> float:
        """The dropout before the output layer for spans; 0 as in run_squad.create_model."""
        return 0.0

    @property
    def pooled_dropout_prob(self) -> float:
        """The dropout before a classifier of pooled outputs."""
        return self.hidden_dropout_prob

    @property
    def embedding_size(self) -> int:
        """The size of embeddings, which are projected to that of hidden states if these differ."""
        return self.hidden_size

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding table."""
        return padded(self.vocab_size)


@dataclasses.dataclass(frozen=True)
class BertConfig(ModelConfig):
    """The architecture of a BERT model. Fields are named as in Google's `bert_config.json` and Hugging Face's."""

    vocab_size: int = size(30522)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(12, most=1000)  # a damaged file may say anything
    num_attention_heads: int = size(12)
    intermediate_size: int = size(3072)
    # gelu_new is the tanh form, as in Google's modeling.gelu; gelu is the erf form, as in Hugging Face's.
    hidden_act: str = field("gelu_new", "behaviour", choices=("gelu", "gelu_new", "relu"))
    hidden_dropout_prob: float = field(0.1, least=0, below=1)
    attention_probs_dropout_prob: float = field(0.1, least=0, below=1)
    max_position_embeddings: int = size(512)
    type_vocab_size: int = size(2)
    initializer_range: float = field(0.02, above=0, below=1)
    layer_norm_eps: float = field(1e-12, "behaviour", above=0, below=1)
    # How it is computed: by chip and length; by the compiler; in a kernel, where there is one.
    attention: str = field("auto", choices=("auto", "xla", "fused"))
    # Where BERT differs from the models it is compared with. BERT's choice comes first.
    family: str = field("bert", "form")  # one of `families`
    causal: bool = field(False, "choice")  # tokens attend to earlier ones only, and learn to predict the next one
    # sinusoidal: the original Transformer's; each_layer: learned, a table of each layer's own, added before it.
    positions: str = field("learned", "form", choices=("learned", "sinusoidal", "none", "each_layer"))
    norm: str = field("post", "form", choices=("post", "pre"))  # LayerNorm after each sum; before each part (GPT-2)
    # The words' output layer. transform: dense, activation, LayerNorm, then the embeddings and a bias; plain: the
    # embeddings alone (GPT).
    output: str = field("transform", "form", choices=("transform", "plain"))


def padded(vocab_size: int) -> int:
    """Rounds the size of a vocabulary up to a multiple of 128, the lanes of a TPU."""
    return -(-vocab_size // 128) * 128


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which kernels have low-rank updates, see `nn.ops.low_rank`; fields as in `config.lora`."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a model computes: changes its results by no more than rounding, but for `lora`, which adds to it."""

    dtype: str = "float32"  # type of activations; params are float32
    product_dtype: str = "float32"  # type that matrix products take; they sum in float32
    remat: str = "none"  # see `common_config`
    unroll: bool = False  # see `common_config`; with remat "none" only
    chip: str = ""  # `device_kind` of the devices, for kernels; empty: none
    lora: Lora | None = None

    @property
    def casts_factors(self) -> bool:
        """Whether products take another type than activations have."""
        return self.product_dtype != self.dtype


# (layers, hidden size, heads). base and large: Devlin et al. 2019, section 3; other BERTs: Turc et al. 2019, table 1;
# gpt: Radford et al. 2018, section 4.1; gpt2: Radford et al. 2019, table 2.
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


def model_size(name: str) -> dict:
    """Returns the `config.model` fields of a published size, or of LAYERS-HIDDEN-HEADS, such as 12-768-12.

    Raises `UserError` for any other name.
    """
    numbers = SIZES.get(name) or (tuple(map(int, name.split("-"))) if re.fullmatch(r"\d+-\d+-\d+", name) else None)
    if numbers is None:
        raise UserError(f"unknown model size {name!r}: choose one of {', '.join(SIZES)}, or LAYERS-HIDDEN-HEADS")
    layers, hidden, heads = numbers
    return dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden)

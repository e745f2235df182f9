"""Chooses the sizes of a model and its training for a text, a machine and a budget.

The model is the largest one for which the budget has `TOKENS_PER_PARAM` tokens: with fewer tokens, a smaller model
learns more in the same time (Hoffmann et al. 2022, section 3). RESULTS.md compares sizes on two CPU cores.
"""

import dataclasses
import math

# Layers and hidden sizes. Heads have 64 numbers (32 in the two smallest).
SIZES = {
    "modern": ((2, 128), (4, 192), (4, 256), (7, 256), (10, 384), (12, 512), (19, 512), (22, 768), (28, 1024)),
    "bert": ((2, 128), (4, 256), (4, 512), (8, 512), (12, 768), (24, 1024)),
}
# Params of layers for each token of the text: a larger model learns the text by heart. The encoders of the BabyLM
# challenge (Warstadt et al. 2023), of 85 M params for 13 M tokens, have about as many.
MOST_PARAMS_PER_TOKEN = 5
TOKENS_PER_PARAM = 20  # Hoffmann et al. 2022, table 3; params without those of embeddings
# After 40 epochs, repeated tokens are worth nearly nothing (Muennighoff et al. 2023, section 6); masks change, though.
MOST_EPOCHS = 100
LONG_SECONDS = 600  # from this time on, a second stage of longer sequences is worth its compilation
HALF_SPEED_HIDDEN_SIZE = 64  # layers of this width reach half of the speed of wide layers


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a run.

    Attributes:
      platform: of JAX: cpu, gpu or tpu.
      name: of a device.
      devices: of all hosts.
      cores: of this host's processor.
      memory: bytes of a device, or of the host if the device is its processor.
      flops: matrix products of all devices together, measured in FLOP/s.
    """

    platform: str
    name: str
    devices: int
    cores: int
    memory: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Text:
    """A corpus, as far as the choice depends on it.

    Attributes:
      bytes: of its text (estimated if the survey ended before its end).
      documents: number of them (estimated in the same way).
      lengths: bytes of documents: the 50th, 90th and 99th percentile.
      latin: share of its letters that are Latin.
      words: the number of different words in the surveyed part.
      has_spaces: whether spaces separate its words.
    """

    bytes: float
    documents: float
    lengths: tuple[float, float, float]
    latin: float = 1.0
    words: int = 100_000
    has_spaces: bool = True


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The chosen sizes. The numbers of steps are estimates; `steps` replaces them by measured numbers."""

    vocab_size: int
    layers: int
    hidden_size: int
    heads: int
    intermediate_size: int
    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    steps: tuple[int, ...]
    learning_rate: float
    heldout_fraction: float

    @property
    def tokens(self) -> int:
        return sum(map(math.prod, zip(self.steps, self.batch_sizes, self.lengths)))


def kind_of_tokenizer(recipe: str, text: Text) -> str:
    """Returns "bpe" or "wordpiece".

    A letter that is not Latin takes several bytes, so WordPiece, whose pieces are characters, needs fewer pieces. If no
    spaces separate the words, WordPiece would make a piece of each character.
    """
    return "bpe" if not text.has_spaces or (recipe == "modern" and text.latin >= 0.5) else "wordpiece"


def vocabulary_size(text: Text) -> int:
    """Returns a number of pieces that grows with the text: 4,480 for 3 MB, 16,384 for 50 MB, at most 32,768."""
    pieces = 128 * round(22.5 * (text.bytes / 1e6) ** 0.4)
    most = 128 * int(text.words / 2 // 128) if text.has_spaces else pieces  # rare words are no pieces
    return max(640, min(pieces, most, 32_768))


def heldout_fraction(text: Text) -> float:
    """Returns the share of documents that is held out: about 200 kB and at least 12 documents, but at most 40 %."""
    share = max(min(0.1, 200_000 / max(1.0, text.bytes)), 12 / max(1.0, text.documents))
    return round(min(0.4, max(0.005, share)), 4)


def lengths_of(text: Text, bytes_per_token: float, seconds: float) -> tuple[int, ...]:
    """Returns the sequence lengths: as long as nine of ten documents, at most 128; for longer ones a second stage."""
    tokens = text.lengths[1] / bytes_per_token
    short = next((length for length in (32, 64) if length >= tokens), 128)
    longer = next((length for length in (256, 512) if length >= tokens), 512)
    return (short, longer) if tokens > 1.5 * short and seconds >= LONG_SECONDS else (short,)


def layer_params(recipe: str, layers: int, hidden: int) -> int:
    return layers * ((4 + 3 * 1.5) if recipe == "modern" else 12) * hidden * hidden


def flops_per_token(recipe: str, layers: int, hidden: int, vocab_size: int, length: int) -> float:
    """Returns the FLOPs of training on a token: of layers, attention, and the output layer at masked places."""
    share = 0.3 if recipe == "modern" else 0.15
    head = share * (hidden * hidden + vocab_size * hidden)
    return 6 * (layer_params(recipe, layers, hidden) + head + 2 * layers * length * hidden)


def memory_needed(
    recipe: str, layers: int, hidden: int, vocab_size: int, tokens: int, length: int, on_cpu: bool
) -> float:
    """Estimates the bytes of a training step: params, gradients and moments, and the activations of `tokens` tokens.

    On accelerators, activations are bfloat16, and kernels do not store the probabilities of attention.
    """
    params = layer_params(recipe, layers, hidden) + vocab_size * hidden
    share = 0.3 if recipe == "modern" else 0.15
    of_token = layers * 20 * hidden + 3 * share * vocab_size
    if on_cpu:
        of_token += layers * 2 * length * max(1, hidden // 64)
    return 20 * params + (4 if on_cpu else 2) * tokens * of_token


def speed(machine: Machine, hidden: int) -> float:
    """Estimates the FLOP/s of training: half of the FLOP/s of matrix products alone, and less in narrow layers."""
    return 0.5 * machine.flops * hidden / (hidden + HALF_SPEED_HIDDEN_SIZE)


def choose(
    text: Text,
    machine: Machine,
    seconds: float,
    tokens: float = math.inf,
    recipe: str = "modern",
    bytes_per_token: float = 4.0,
    fixed: dict | None = None,
) -> Sizes:
    """Returns the largest sizes for which there are enough tokens, text and memory; or else the smallest.

    Args:
      seconds: that are left for the steps; inf if `tokens` is the budget.
      fixed: values that are chosen already: `vocab_size`, `layers`, `hidden_size`, `batch_size`, `lengths`; and
        `multiple`, of which batch sizes are multiples.
    """
    fixed = fixed or {}
    lengths = fixed.get("lengths") or lengths_of(text, bytes_per_token, seconds)
    vocab_size = fixed.get("vocab_size") or vocabulary_size(text)
    unique, on_cpu = text.bytes / bytes_per_token, machine.platform == "cpu"

    def trained_tokens(layers: int, hidden: int) -> float:
        of_token = flops_per_token(recipe, layers, hidden, vocab_size, lengths[-1])
        if math.isfinite(tokens):
            return tokens
        return min(seconds * speed(machine, hidden) / of_token, MOST_EPOCHS * unique)

    def memory(layers: int, hidden: int, in_step: int) -> float:
        return memory_needed(recipe, layers, hidden, vocab_size, in_step // machine.devices, lengths[-1], on_cpu)

    def tokens_of_step(layers: int, hidden: int) -> int:
        """Returns a number of tokens that fits in half of the memory."""
        in_step, least = tokens_per_step(machine, trained_tokens(layers, hidden)), 1024 * machine.devices
        while in_step > least and memory(layers, hidden, in_step) > machine.memory / 2:
            in_step //= 2
        return in_step

    def fits(layers: int, hidden: int) -> bool:
        params = layer_params(recipe, layers, hidden)
        is_fed = trained_tokens(layers, hidden) >= TOKENS_PER_PARAM * params
        has_room = memory(layers, hidden, tokens_of_step(layers, hidden)) <= machine.memory / 2
        return is_fed and has_room and params <= MOST_PARAMS_PER_TOKEN * unique

    sizes = [
        size
        for size in SIZES[recipe]
        if size[0] == fixed.get("layers", size[0]) and size[1] == fixed.get("hidden_size", size[1])
    ] or [(fixed.get("layers", 4), fixed.get("hidden_size", 256))]
    layers, hidden = next((size for size in reversed(sizes) if fits(*size)), sizes[0])
    used, in_step = trained_tokens(layers, hidden), tokens_of_step(layers, hidden)
    multiple = machine.devices * fixed.get("multiple", 1)
    batch_sizes = [fixed.get("batch_size") or whole(in_step / length, multiple) for length in lengths]
    shares = (1.0,) if len(lengths) == 1 else (0.85, 0.15)
    steps = [
        max(1, round(share * used / (batch * length))) for share, batch, length in zip(shares, batch_sizes, lengths)
    ]
    return Sizes(
        vocab_size,
        layers,
        hidden,
        number_of_heads(hidden),
        intermediate_size(recipe, hidden),
        tuple(lengths),
        tuple(batch_sizes),
        tuple(steps),
        learning_rate(recipe, hidden),
        heldout_fraction(text),
    )


def number_of_heads(hidden: int) -> int:
    """Returns a number that divides the hidden size, so that a head has 64 numbers, or 32 in narrow models, or more."""
    most = max(1, hidden // (32 if hidden < 256 else 64))
    return next(heads for heads in range(most, 0, -1) if hidden % heads == 0)


def intermediate_size(recipe: str, hidden: int) -> int:
    """Returns the width of feed-forward layers: 4 times the hidden size, or 1.5 times if they are gated."""
    return hidden * 3 // 2 if recipe == "modern" else 4 * hidden


def learning_rate(recipe: str, hidden: int) -> float:
    """Returns the peak rate. modern: Weller et al. 2025, table 1, by width. bert: 1e-4 at the width of BERT-base
    (Devlin et al. 2019, A.2), and higher in narrower models."""
    if recipe == "modern":
        return 3e-3 if hidden <= 512 else 8e-4 if hidden <= 768 else 5e-4
    return float(f"{min(2e-3, 1e-4 * (768 / hidden) ** 1.7):.1g}")


def tokens_per_step(machine: Machine, tokens: float) -> int:
    """Returns a power of two of tokens, so that a run has about 2,000 steps on a CPU, or 10,000 on accelerators."""
    on_cpu = machine.platform == "cpu"
    wanted, least, most = (tokens / 2000, 1024, 8192) if on_cpu else (tokens / 10_000, 8192, 524_288)
    return 2 ** round(math.log2(min(most, max(least, wanted)))) * (1 if on_cpu else machine.devices)


def whole(number: float, multiple: int) -> int:
    return max(1, round(number / multiple)) * multiple

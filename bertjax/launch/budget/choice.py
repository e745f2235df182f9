"""Chooses the sizes of a model and its training for a text, a machine and a budget.

The model is the largest model for which the budget has `TOKENS_PER_PARAM` tokens. With fewer tokens, a smaller model
reaches a lower loss in the same time (Hoffmann et al. 2022, section 3). RESULTS.md compares sizes on two CPU cores.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any

# Recipe -> (layers, hidden size) of the possible models. `number_of_heads` chooses the number of heads.
SIZES = {
    "modern": ((2, 128), (4, 192), (4, 256), (7, 256), (10, 384), (12, 512), (19, 512), (22, 768), (28, 1024)),
    "bert": ((2, 128), (4, 256), (4, 512), (8, 512), (12, 768), (24, 1024)),
}
MASKED_SHARES = {"modern": 0.3, "bert": 0.15}  # recipe -> fraction of the tokens that are predicted
# Params of layers per token of the text. A larger model memorizes the text. The encoders of the BabyLM challenge
# (Warstadt et al. 2023) have 85 M params for 13 M tokens, a similar ratio.
MOST_PARAMS_PER_TOKEN = 5
TOKENS_PER_PARAM = 20  # Hoffmann et al. 2022, table 3; params of layers only
# After 40 epochs, repeated tokens hardly reduce the loss (Muennighoff et al. 2023, section 6). Here, the limit is
# higher, because each epoch masks other tokens.
MOST_EPOCHS = 100
LONG_SECONDS = 600  # a shorter run has no second stage with longer sequences, because this stage must be compiled
HALF_SPEED_HIDDEN_SIZE = 64  # layers of this width reach half of the speed of wide layers


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a run.

    Attributes:
      platform: the platform in JAX: cpu, gpu or tpu.
      devices: the number of devices of all hosts.
      cores: the number of CPU cores of this host.
      memory: the bytes of a device, or of the host if the device is its processor.
      flops: the measured FLOP/s of matrix products on all devices together.
    """

    platform: str
    devices: int
    cores: int
    memory: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Text:
    """The properties of a corpus that determine the sizes.

    Attributes:
      bytes: the size of the text; estimated if the survey has read only a part of the corpus.
      documents: the number of documents, estimated in the same way.
      lengths: the 50th, 90th and 99th percentile of the bytes of a document.
      latin: the fraction of Latin letters among the letters.
      words: the number of different words in the surveyed part.
      has_spaces: whether spaces separate the words.
    """

    bytes: float
    documents: float
    lengths: tuple[float, float, float]
    latin: float = 1.0
    words: int = 100_000
    has_spaces: bool = True


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The chosen sizes. The numbers of steps are estimates, which `launch.budget.steps` replaces after measurements.

    The tuples have one entry per stage.
    """

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


def kind_of_tokenizer(recipe: str, text: Text) -> str:
    """Returns "bpe" or "wordpiece".

    BPE merges bytes, and a letter that is not Latin has several bytes. WordPiece merges characters, but needs spaces
    between the words: without spaces, each character would be a token.
    """
    return "bpe" if not text.has_spaces or (recipe == "modern" and text.latin >= 0.5) else "wordpiece"


def vocabulary_size(text: Text) -> int:
    """Returns a vocabulary size that grows with the text: 4,480 for 3 MB, 16,384 for 50 MB, at most 32,768."""
    tokens = 128 * round(22.5 * (text.bytes / 1e6) ** 0.4)
    most = 128 * int(text.words / 2 // 128) if text.has_spaces else tokens  # rare words do not become tokens
    return max(640, min(tokens, most, 32_768))


def heldout_fraction(text: Text) -> float:
    """Returns the fraction of held-out documents: about 200 kB and at least 12 documents, but at most 40 %."""
    share = max(min(0.1, 200_000 / max(1.0, text.bytes)), 12 / max(1.0, text.documents))
    return round(min(0.4, max(0.005, share)), 4)


def lengths_of(text: Text, bytes_per_token: float, seconds: float) -> tuple[int, ...]:
    """Returns the sequence length of each stage.

    The first length holds nine of ten documents, and is at most 128. Longer documents get a second stage.
    """
    tokens = text.lengths[1] / bytes_per_token
    short = 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    longer = 256 if tokens <= 256 else 512
    return (short, longer) if tokens > 1.5 * short and seconds >= LONG_SECONDS else (short,)


def layer_params(recipe: str, layers: int, hidden: int) -> float:
    """Returns the number of params of the layers."""
    return layers * (4 + 3 * 1.5 if recipe == "modern" else 12) * hidden * hidden


def flops_per_token(recipe: str, layers: int, hidden: int, vocab_size: int, length: int) -> float:
    """Returns the FLOPs of training per token: of layers, attention, and the head at masked positions."""
    head = MASKED_SHARES[recipe] * (hidden * hidden + vocab_size * hidden)
    return 6 * (layer_params(recipe, layers, hidden) + head + 2 * layers * length * hidden)


def memory_needed(
    recipe: str, layers: int, hidden: int, vocab_size: int, tokens: int, length: int, on_cpu: bool
) -> float:
    """Estimates the bytes of a training step: params, gradients and moments, and the activations of `tokens` tokens.

    On accelerators, activations are bfloat16, and kernels do not store the attention probabilities.
    """
    params = layer_params(recipe, layers, hidden) + vocab_size * hidden
    activations = layers * 20 * hidden + 3 * MASKED_SHARES[recipe] * vocab_size
    if on_cpu:
        activations += layers * 2 * length * max(1, hidden // 64)
    return 20 * params + (4 if on_cpu else 2) * tokens * activations


def speed(machine: Machine, hidden: int) -> float:
    """Estimates the FLOP/s of training: half of the FLOP/s of matrix products alone, and less in narrow layers."""
    return 0.5 * machine.flops * hidden / (hidden + HALF_SPEED_HIDDEN_SIZE)


def choose_sizes(
    text: Text,
    machine: Machine,
    seconds: float,
    tokens: float = math.inf,
    recipe: str = "modern",
    bytes_per_token: float = 4.0,
    fixed: Mapping[str, Any] = types.MappingProxyType({}),
) -> Sizes:
    """Returns the largest sizes for which budget, text and memory suffice; the smallest sizes if none fit.

    Args:
      text: the corpus.
      machine: the devices.
      seconds: the time for the steps; inf if `tokens` is the budget.
      tokens: the number of tokens to train on; inf if `seconds` is the budget.
      recipe: the recipe, "modern" or "bert".
      bytes_per_token: bytes of text per token.
      fixed: values that are not chosen: `vocab_size`, `layers`, `hidden_size`, `batch_size` and `lengths`. With
        `multiple`, batch sizes are multiples of this number.
    """
    lengths = fixed.get("lengths") or lengths_of(text, bytes_per_token, seconds)
    vocab_size = fixed.get("vocab_size") or vocabulary_size(text)
    unique, on_cpu = text.bytes / bytes_per_token, machine.platform == "cpu"

    def trained_tokens(layers: int, hidden: int) -> float:
        """Returns the number of tokens that a model can train on."""
        if math.isfinite(tokens):
            return tokens
        flops = flops_per_token(recipe, layers, hidden, vocab_size, lengths[-1])
        return min(seconds * speed(machine, hidden) / flops, MOST_EPOCHS * unique)

    def has_room(layers: int, hidden: int, in_step: int) -> bool:
        """Returns whether a step needs at most half of the memory of a device."""
        on_device = in_step // machine.devices
        needed = memory_needed(recipe, layers, hidden, vocab_size, on_device, lengths[-1], on_cpu)
        return needed <= machine.memory / 2

    def tokens_of_step(layers: int, hidden: int) -> int:
        """Returns a number of tokens per step that fits in memory, or else the smallest number."""
        in_step = tokens_per_step(machine, trained_tokens(layers, hidden))
        while in_step > 1024 * machine.devices and not has_room(layers, hidden, in_step):
            in_step //= 2
        return in_step

    def fits(layers: int, hidden: int) -> bool:
        """Returns whether there are enough tokens and memory for a model."""
        params = layer_params(recipe, layers, hidden)
        most_params = min(trained_tokens(layers, hidden) / TOKENS_PER_PARAM, MOST_PARAMS_PER_TOKEN * unique)
        return params <= most_params and has_room(layers, hidden, tokens_of_step(layers, hidden))

    wanted = fixed.get("layers"), fixed.get("hidden_size")
    sizes = [size for size in SIZES[recipe] if all(a in (None, b) for a, b in zip(wanted, size))]
    sizes = sizes or [(fixed.get("layers", 4), fixed.get("hidden_size", 256))]
    layers, hidden = next((size for size in reversed(sizes) if fits(*size)), sizes[0])
    multiple = machine.devices * fixed.get("multiple", 1)
    in_step = tokens_of_step(layers, hidden)
    batch_sizes = [
        fixed.get("batch_size") or max(1, round(in_step / length / multiple)) * multiple for length in lengths
    ]
    shares = (1.0,) if len(lengths) == 1 else (0.85, 0.15)
    used = trained_tokens(layers, hidden)
    steps = [max(1, round(share * used / (size * length))) for share, size, length in zip(shares, batch_sizes, lengths)]
    return Sizes(
        vocab_size=vocab_size,
        layers=layers,
        hidden_size=hidden,
        heads=number_of_heads(hidden),
        intermediate_size=hidden * 3 // 2 if recipe == "modern" else 4 * hidden,  # gated layers are narrower
        lengths=tuple(lengths),
        batch_sizes=tuple(batch_sizes),
        steps=tuple(steps),
        learning_rate=learning_rate(recipe, hidden),
        heldout_fraction=heldout_fraction(text),
    )


def number_of_heads(hidden: int) -> int:
    """Returns a divisor of the hidden size. The size of a head is at least 64, or at least 32 in narrow models."""
    most = max(1, hidden // (32 if hidden < 256 else 64))
    return next(heads for heads in range(most, 0, -1) if hidden % heads == 0)


def learning_rate(recipe: str, hidden: int) -> float:
    """Returns the peak learning rate for a hidden size.

    The values of modern are from Weller et al. 2025, table 1. The value of bert is 1e-4 at the width of BERT-base
    (Devlin et al. 2019, A.2), and higher in narrower models.
    """
    if recipe == "modern":
        return 3e-3 if hidden <= 512 else 8e-4 if hidden <= 768 else 5e-4
    return float(f"{min(2e-3, 1e-4 * (768 / hidden) ** 1.7):.1g}")


def tokens_per_step(machine: Machine, tokens: float) -> int:
    """Returns a power of two with which a run has about 2,000 steps on a CPU, or 10,000 steps on accelerators."""
    on_cpu = machine.platform == "cpu"
    wanted, least, most = (tokens / 2000, 1024, 8192) if on_cpu else (tokens / 10_000, 8192, 524_288)
    return 2 ** round(math.log2(min(most, max(least, wanted)))) * (1 if on_cpu else machine.devices)

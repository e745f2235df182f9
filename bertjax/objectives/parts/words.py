"""What the objectives that predict words have in common: the loss at `word_positions`, and the unigram baseline."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from bertjax.config.limits import require, value_of
from bertjax.config.model_config import BertConfig
from bertjax.models import families
from bertjax.objectives.objective import Objective, Plot, Statistics
from bertjax.objectives.parsing import OF_WORDS

# Logits of more bytes than this are computed a part at a time, forwards and again backwards, so that they never exist
# together: of 8,192 tokens of which 30 % are predicted, two sequences' would be a GiB. Twice the work takes its time.
MOST_BYTES, PART_BYTES = 1 << 30, 1 << 28
PLOTS = (
    Plot("loss of words", "loss", "unigram_loss", is_main=True),
    Plot("accuracy of words", "accuracy", "{name}_majority", is_main=True),
)


def predicting(title: str, words: str, validate: Callable = lambda config: None, **own) -> Objective:
    """Returns an objective that predicts the words at `word_positions`.

    Args:
      words: the `LmType` that the model needs, see `models.family`.
      validate: what else it checks of a config.
      own: fields of `Objective` in which these objectives differ.
    """

    def validated(config) -> None:
        learns = families.lm_type_of(config)
        remedy = (
            f"a model with these fields of config.model learns words as {OF_WORDS[learns]}, not as {OF_WORDS[words]}"
        )
        require(learns == words, "objective", config.objective, remedy)
        validate(config)

    return Objective(
        loss=_loss,
        scores=_scores,
        report=functools.partial(report, title),
        heads=_heads,
        weights=lambda batch: batch["word_weights"],
        total=lambda weights: weights.sum() + 1e-5,  # as in run_pretraining.get_masked_lm_output
        baselines=_baselines,
        statistics=Statistics(lambda config: (config.vocab_size,), _unigram_log_probabilities),
        flops=_flops,
        validate=validated,
        plots=PLOTS,
        **own,
    )


def _heads(config, compute) -> dict:
    from bertjax.nn.heads import MaskedLanguageModelHead

    return {"masked_lm": MaskedLanguageModelHead(config, compute)}


def _loss(encoded, weights, keys):
    del keys
    return loss_of_words(encoded, weights)[0]


def loss_of_words(encoded, weights, keys=None):
    """Returns the sums of the cross-entropy and of the correct predictions, over all words with a weight; and with
    `keys` `[rows]` words that are drawn from the predictions, `[rows, predictions]`."""
    import jax.numpy as jnp

    from bertjax.models.heads import word_logits
    from bertjax.objectives.parts.pretraining_model import classified, drawn, summed_in_parts

    batch, encoder, head = encoded.batch, encoded.encoder, encoded.heads["masked_lm"]
    positions, words, size = batch["word_positions"], batch["word_ids"], head.config.padded_vocab_size

    def read(logits, words, weights, first=0):
        found = classified(logits, words, weights, encoded.z_loss)
        return found, None if keys is None else drawn(logits, keys, first * size)

    is_small = positions.size * 4 * size <= MOST_BYTES
    if is_small or encoder.is_initializing() or len(list(encoder.readers(encoded.hidden, positions))) > 1:
        return read(word_logits(encoder, head, encoded.hidden, positions), words, weights)
    module, variables = head.unbind()  # which the loop can call
    table, rows = encoder.word_embeddings(), len(positions)

    def read_part(positions, words, weights, columns):
        logits = module.apply(variables, encoded.hidden, positions, table)
        return read(logits, words, weights, columns[0, 0])

    columns = jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape)
    part = max(1, PART_BYTES // (rows * 4 * size))
    return summed_in_parts(read_part, (positions, words, weights, columns), part)


def words_of_rows(share: float, stage, sequences: int) -> int:
    """Returns the words that are predicted, at most, in a row of so many sequences, of each of which it is a share."""
    # Their number is rounded, and at least one; the shortest sequence has three tokens.
    wanted = share * stage.length
    rounded = math.ceil(wanted + sequences / 2)
    at_least_one = math.floor(wanted + sequences * (1 - 3 * share))
    return min(max(rounded, at_least_one), sequences * stage.max_predictions_per_seq)


def _baselines(batch, weights, unigram):
    """Predicting the frequencies of words in the training data, and always the most frequent word."""
    words = batch["word_ids"]
    return {
        "unigram_loss": -(weights * unigram[words]).sum(),
        "majority": (weights * (words == unigram.argmax())).sum(),
    }


def _unigram_log_probabilities(config: BertConfig, batches: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
    """`[vocab_size]` float32, from the predicted words, with add-one smoothing."""
    counts = np.ones(config.vocab_size, np.int64)
    for batch in batches:
        counts += np.bincount(batch["word_ids"][batch["word_weights"] > 0], minlength=len(counts))
    return np.log(counts / counts.sum()).astype(np.float32)


def _scores(name: str, means: dict[str, float]) -> dict[str, float]:
    return {
        f"{name}_loss": means["loss"],
        "unigram_loss": means["unigram_loss"],
        f"{name}_accuracy": means["accuracy"],
        f"{name}_majority": means["majority"],
    }


def report(title: str, name: str, scores: Mapping[str, float]) -> list[str]:
    """As `Objective.report`."""
    loss, accuracy, majority = (scores[f"{name}_{metric}"] for metric in ("loss", "accuracy", "majority"))
    unigram = scores["unigram_loss"]
    comparison = f"{abs(unigram - loss):.3f} {'better' if loss < unigram else 'worse'} than it"
    title = f"held-out {title}: "
    lines = [
        f"{title}loss {loss:.3f} nats; unigram baseline {unigram:.3f} ({comparison})",
        f"{'':{len(title)}}accuracy {accuracy:.1%}; always the most frequent word {majority:.1%}",
    ]
    for score, loss in scores.items():
        if found := re.fullmatch(rf"{name}_loss \((.*)\)", score):
            accuracy = scores[f"{name}_accuracy ({found[1]})"]
            lines.append(f"{'':{len(title)}}of {found[1]}: loss {loss:.3f}, accuracy {accuracy:.1%}")
    return lines


def _flops(config: BertConfig, row) -> int:
    from bertjax.nn.heads import word_flops

    return word_flops(config, row.predictions)


def next_words(ids: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the positions before a row's next words, these words, and which there are `[rows, length - 1]`.

    Args:
      ids: `[rows, length]`, padded.
      sizes: `[rows]`, tokens of each row.

    All tokens predict the next one, except those before the [SEP] that closes the row: it says where the row ends, not
    the document.
    """
    place = np.arange(ids.shape[1] - 1, dtype=ids.dtype)
    used = place < sizes[:, None] - 2
    return np.where(used, place, 0), np.where(used, ids[:, 1:], 0), used


def addition_of(predicted: Callable) -> Callable:
    """Returns an `Objective.addition` of words that are not in the records.

    Args:
      predicted: (ids `[rows, length]`, sizes `[rows]`) -> positions, words, and which there are `[rows, predictions]`.
    """

    def add(batch, drawn):
        positions, words, used = predicted(batch["input_ids"], batch["segments"].sum(1))
        return {"word_positions": positions, "word_ids": words, "word_weights": used.astype(np.float32)}

    def addition(config, stage, tokenizer):
        from bertjax.data.loading.transforms import Addition

        return Addition(add)

    return addition


def validate_unmasked(title: str, config) -> None:
    """Raises `UserError` unless nothing in the data is masked, and there are no pairs."""
    validate_not_masked(title, config)
    for field, needed in (("data.next_sentence", "none"), ("eval.fill_masks", ())):
        why = f"nothing is masked where {title} are learnt, and there are no pairs; set {needed}"
        require(value_of(config, field) == needed, field, value_of(config, field), why)


def validate_not_masked(title: str, config) -> None:
    """Raises `UserError` unless nothing in the data is masked."""
    for field, needed in (
        ("data.masking", "dynamic"),
        ("data.do_whole_word_mask", False),
        ("data.do_span_mask", False),
    ):
        why = f"nothing is masked where {title} are learnt; set {needed}"
        require(value_of(config, field) == needed, field, value_of(config, field), why)

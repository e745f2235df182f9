"""Vectors of texts, for search, clustering and comparison: an encoder that is trained so that the vectors of texts that
belong together are near each other (Reimers and Gurevych 2019; Gao et al. 2021)."""

import functools
from collections.abc import Callable, Iterator, Sequence

import ml_collections
import numpy as np

from bertjax.config import UserError
from bertjax.data.batches.mixed import Share
from bertjax.families.with_heads import SentenceEncoder, forward_flops
from bertjax.interop.pretrained import Pretrained
from bertjax.tasks import metrics, output_layers, text_sets, vector_losses
from bertjax.tasks.finetuning import Dataset, FineTuningTask, InputForm, Split
from bertjax.tasks.output_layers import OutputLayer
from bertjax.tasks.overlap import seen_in_training
from bertjax.tasks.pairs import encode_pairs
from bertjax.tasks.text_sets import DOCUMENT, FORMS, QUERY, Encoded, TextSet
from bertjax.text.tokenizer import Tokenizer
from bertjax.validation import one_of, require

ARCHITECTURE = "SentenceTransformer"  # the class of sentence-transformers


def output_layer(loss: Callable) -> OutputLayer:
    """The vectors of texts, `[batch, width]`; `config.head` sets how they are made of hidden states."""

    def flops(model: SentenceEncoder, sequences: int, length: int) -> int:
        dense = 2 * sequences * model.config.hidden_size * model.dense
        return 3 * (forward_flops(model.config, sequences, length, 0, pooled=0) + dense)

    return OutputLayer(ARCHITECTURE, SentenceEncoder, loss, flops=flops, packs=True, couples=True, pooled=True)


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the training sets and the dev set. Raises `UserError` for missing or invalid files."""
    data, notes = config.data, []
    encode = functools.partial(
        text_sets.encode, prompts=prompts_of(data), tokenizer=tokenizer, max_seq_length=config.max_seq_length
    )
    sets, texts = [], []
    for name, given in training_sets(data).items():
        found = text_sets.read(given, "train")
        encoded = encode(found, given.form)
        sets.append(Share(text_sets.training_examples(encoded, found.values), given.weight))
        texts += found.texts
        notes.append(_describe(name or "training", found, encoded, config.max_seq_length))
    given = dev_set(data)
    found = text_sets.read(given, "dev")
    encoded = encode(found, given.form)
    notes.append(_describe("dev", found, encoded, config.max_seq_length))
    notes += seen_in_training(texts, ("dev examples", found.texts))
    split, metric = judged(found, given.form, encoded)
    layer = output_layer(vector_losses.of_settings(config.loss, widths_of(config)))
    first, *others = sets
    return Dataset(layer, (), first.examples, (split,), metric, tuple(notes), others=tuple(others))


def sample(config, input_ids: np.ndarray) -> Dataset:
    """Returns a batch of `config.data`, all texts of which are the same, see `FineTuningTask.sample`."""
    texts, values = text_sets.shape_of(config.data)
    one = text_sets.Examples([input_ids], [np.zeros_like(input_ids)])
    encoded = Encoded(one, np.zeros((config.batch_size, texts), np.int32), cut=0)
    train = text_sets.training_examples(encoded, values and np.zeros(config.batch_size, values))
    layer = output_layer(vector_losses.of_settings(config.loss, widths_of(config)))
    dev = Split(text_sets.Examples(train.input_ids, train.token_types), score=lambda vectors: {})
    return Dataset(layer, (), train, (dev,), metric="")


def _describe(name: str, found: TextSet, encoded: Encoded, most: int) -> str:
    cut = f", {encoded.cut} of them truncated to {most} tokens" if encoded.cut else ""
    return f"{len(found.texts)} {name} examples of {len(encoded.examples)} texts{cut}"


def training_sets(data) -> dict[str, ml_collections.ConfigDict]:
    """Returns the training sets by name; that of `config.data` itself is "" and comes first."""
    return {"": _section(data, weight=1.0), **data.sets}


def dev_set(data) -> ml_collections.ConfigDict:
    """Returns the dev set: what `data.dev` does not say is as in training."""
    return _section(data, **{name: value for name, value in data.dev.items() if value})


def _section(data, **changes) -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict({name: data[name] for name in ("path", "form", "texts", "label")} | changes)


def prompts_of(data) -> dict[str, str]:
    return {QUERY: data.get("query_prompt", ""), DOCUMENT: data.get("document_prompt", "")}


def widths_of(config) -> tuple[int, ...]:
    """Returns the widths of `config.loss.widths`; () if there are none."""
    return tuple(int(width) for width in config.loss.widths.split(",") if width.strip())


def judged(found: TextSet, form: str, encoded: Encoded) -> tuple[Split, str]:
    """Returns a set with how vectors are judged by it, and the metric that ranks runs."""
    if form != "scored":
        raise UserError(f"config.data.dev.form = {form!r}: not yet")

    def score(vectors: list[np.ndarray]) -> dict[str, float]:
        first, second = (np.stack(vectors)[encoded.numbers[:, i]] for i in range(2))
        cosines = (metrics.unit(first) * metrics.unit(second)).sum(-1)
        return {name: getattr(metrics, name)(found.values, cosines) for name in ("spearman", "pearson")}

    return Split(encoded.examples, score), "spearman"


def predict(source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
    """Yields the `vector` of each text, or the `cosine` of each pair."""
    flat = [text for parts in texts for text in parts]
    prompt = prompts_of(source.settings.get("data", {}))[QUERY]
    *arrays, cut = encode_pairs(source.tokenizer, [prompt + text for text in flat], None, source.max_seq_length)
    found = output_layers.predict(output_layer(loss=None), source, text_sets.Examples(*arrays))
    parts = len(texts[0])
    for i in range(0, len(flat), parts):
        more = {"cut": True} if any(cut[i : i + parts]) else {}
        if parts == 1:
            yield {"vector": found[i].tolist(), **more}
        else:
            yield {"cosine": float(metrics.unit(found[i]) @ metrics.unit(found[i + 1])), **more}


def validate(config) -> None:
    one_of(config, "head.pooling", ("mean", "cls", "last"))
    one_of(config, "head.dense_act", ("none", "tanh"))
    dense, loss = config.head.dense, config.loss
    require(dense >= 0, "head.dense", dense, "must be the width of a dense layer, or 0 for none")
    require(loss.temperature > 0, "loss.temperature", loss.temperature, "must be above 0")
    require(0 < loss.margin <= 2, "loss.margin", loss.margin, "must be above 0 and at most 2: a cosine's range")
    parts = [part.strip() for part in loss.widths.split(",") if part.strip()]
    width = dense or config.model.hidden_size
    for part in parts:
        numbers = "write widths such as 256,128,64"
        require(part.isdecimal() and int(part) > 0, "loss.widths", loss.widths, numbers)
        most = f"{part} is more than the {width} numbers of a vector"
        require(int(part) <= width, "loss.widths", loss.widths, most)
    require(config.batch_size > 1, "batch_size", config.batch_size, "an example is compared with others: at least 2")
    for name, given in training_sets(config.data).items():
        prefix = f"data.sets.{name}." if name else "data."
        require(given.form in FORMS, f"{prefix}form", given.form, f"choose one of {', '.join(FORMS)}")
        require(given.weight > 0, f"{prefix}weight", given.weight, "must be above 0; or leave the set out")


TASK = FineTuningTask(
    architecture=ARCHITECTURE,
    inputs=InputForm(range(1, 3), 'texts, or pairs as "A ||| B"'),
    load=load,
    predict=predict,
    validate=validate,
    sample=sample,
    identity=("head.pooling", "head.dense", "head.dense_act", "head.normalize"),
)

"""Vectors of texts, for search, clustering and comparison: an encoder that is trained so that the vectors of texts that
belong together are near each other (Reimers and Gurevych 2019; Gao et al. 2021)."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import ml_collections
import numpy as np

from bertjax.config import UserError, fine_tuning_config
from bertjax.data.batches.mixed import Share
from bertjax.families.with_heads import SentenceEncoder, forward_flops
from bertjax.interop.pretrained import Pretrained
from bertjax.tasks import metrics, output_layers, text_sets, vector_losses
from bertjax.tasks.finetuning import Dataset, FineTuningTask, InputForm, Split
from bertjax.tasks.output_layers import OutputLayer
from bertjax.tasks.overlap import seen_in_training
from bertjax.tasks.pairs import encode_pairs
from bertjax.tasks.text_sets import DOCUMENT, QUERY, Encoded, Source, TextSet
from bertjax.text.tokenizer import Tokenizer
from bertjax.validation import one_of, require

ARCHITECTURE = "SentenceTransformer"  # the class of sentence-transformers
SECTION = ("path", "form", "texts", "label")  # the fields of a section about a set
TAUGHT_AT_ONCE = 1024  # examples, of which a teacher's scores are computed


def output_layer() -> OutputLayer:
    """The vectors of texts, `[batch, width]`; `config.head` sets how they are made of hidden states."""

    def flops(model: SentenceEncoder, sequences: int, length: int) -> int:
        dense = 2 * sequences * model.config.hidden_size * model.dense
        return 3 * (forward_flops(model.config, sequences, length, 0, pooled=0) + dense)

    how = dict(flops=flops, packs=True, couples=True, pooled=True)
    return OutputLayer(ARCHITECTURE, SentenceEncoder, None, loss_of=_loss_of, **how)


def _loss_of(config) -> Callable:
    """Returns the loss of a config whose model is known. Raises `UserError` for widths that its vectors have not."""
    widths, width = widths_of(config), width_of(config)
    more = f"{max(widths, default=0)} is more than the {width} numbers of a vector"
    require(max(widths, default=0) <= width, "loss.widths", config.loss.widths, more)
    return vector_losses.of_settings(config.loss, widths)


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the training sets and the dev set. Raises `UserError` for missing or invalid files."""
    data, notes = config.data, []
    encode = functools.partial(
        text_sets.encode, prompts=prompts_of(data), tokenizer=tokenizer, max_seq_length=config.max_seq_length
    )
    sets, texts = [], []
    for name, source in training_sets(data).items():
        found = text_sets.read(source, "train")
        encoded = encode(found, source.form)
        sets.append(Share(text_sets.training_examples(encoded, found.values), source.weight))
        texts.append((found, source.form))
        notes.append(_describe(name or "training", found, encoded, config.max_seq_length))
    source = dev_set(data)
    found = text_sets.read(source, "dev")
    encoded = encode(found, source.form)
    notes.append(_describe("dev", found, encoded, config.max_seq_length))
    trained = itertools.chain.from_iterable(each.texts for each, _ in texts)
    notes += seen_in_training(trained, ("dev examples", found.texts))
    split, metric = judged(found, source.form, encoded)
    first, *others = sets
    return Dataset(
        output_layer(),
        (),
        first.examples,
        (split,),
        metric,
        tuple(notes),
        others=tuple(others),
        taught=functools.partial(_taught, config, texts),
    )


def _taught(config, sets: Sequence[tuple[TextSet, str]], teacher: Pretrained) -> list[np.ndarray]:
    """Returns what a teacher says of each example of sets with their forms: the vectors of its texts, or their scores.

    It reads the texts with its own tokenizer and prompts. Raises `UserError` if it has no vectors, or others.
    """
    says, what = f"config.distill.teacher = {config.distill.teacher!r}: ", config.distill.what
    if teacher.architecture != ARCHITECTURE:
        has = teacher.architecture or "no output layer"
        raise UserError(
            f"{says}has no vectors of texts ({has}); choose a run of embed, or a sentence-transformers folder"
        )
    of_each = []
    for found, form in sets:
        prompts = prompts_of(teacher.settings.get("data", {}))
        encoded = text_sets.encode(found, form, prompts, teacher.tokenizer, teacher.max_seq_length)
        vectors = np.stack(output_layers.predict(output_layer(), teacher, encoded.examples))
        if what == "vectors" and (width := vectors.shape[-1]) != (own := width_of(config)):
            raise UserError(
                f"{says}its vectors have {width} numbers, those of this model {own}; set head.dense={width}, or "
                f"distill.what=scores"
            )
        for numbers in np.array_split(encoded.numbers, len(encoded.numbers) // TAUGHT_AT_ONCE + 1):
            said = vectors[numbers]
            of_each.extend(said if what == "vectors" else np.asarray(vector_losses.scores_of(said)))
    return of_each


def _describe(name: str, found: TextSet, encoded: Encoded, most: int) -> str:
    cut = f", {encoded.cut} of them truncated to {most} tokens" if encoded.cut else ""
    return f"{len(found.texts)} {name} examples of {len(encoded.examples)} texts{cut}"


def training_sets(data) -> dict[str, Source]:
    """Returns the training sets by name; that of `config.data` itself is "" and comes first."""
    own = Source("data", **{name: data[name] for name in SECTION})
    return {"": own, **{name: Source(f"data.sets.{name}", **given) for name, given in data.sets.items()}}


def dev_set(data) -> Source:
    """Returns the dev set: what `data.dev` does not say is as in training."""
    inherited = frozenset(name for name in SECTION if not data.dev[name])
    given = {name: (data if name in inherited else data.dev)[name] for name in SECTION}
    return Source("data.dev", **given, inherited=inherited)


def prompts_of(data) -> dict[str, str]:
    return {QUERY: data.get("query_prompt", ""), DOCUMENT: data.get("document_prompt", "")}


def widths_of(config) -> tuple[int, ...]:
    """Returns the widths of `config.loss.widths`; () if there are none."""
    return tuple(int(width) for width in config.loss.widths.split(",") if width.strip())


def width_of(config) -> int:
    """Returns how many numbers a vector has."""
    return config.head.dense or config.model.hidden_size


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
    found = output_layers.predict(output_layer(), source, text_sets.Examples(*arrays))
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
    dense, loss, distill = config.head.dense, config.loss, config.distill
    require(dense >= 0, "head.dense", dense, "must be the width of a dense layer, or 0 for none")
    require(loss.temperature > 0, "loss.temperature", loss.temperature, "must be above 0")
    require(0 < loss.margin <= 2, "loss.margin", loss.margin, "must be above 0 and at most 2: a cosine's range")
    for part in filter(None, map(str.strip, loss.widths.split(","))):
        numbers = "write widths such as 256,128,64"
        require(part.isdecimal() and int(part) > 0, "loss.widths", loss.widths, numbers)
    require(config.batch_size > 1, "batch_size", config.batch_size, "an example is compared with others: at least 2")
    one_of(config, "distill.what", ("vectors", "scores"))
    none, default = "there is no teacher: set distill.teacher, or leave it out", fine_tuning_config("").distill
    require(bool(distill.teacher) or distill.what == "vectors", "distill.what", distill.what, none)
    divides = "divides logits, of which vectors and scores have none; leave it out"
    is_default = distill.temperature == default.temperature
    require(is_default, "distill.temperature", distill.temperature, divides)
    for name, given in config.data.sets.items():
        given = given.to_dict() if isinstance(given, ml_collections.ConfigDict) else given
        is_set = isinstance(given, dict) and given.keys() == {*SECTION, "weight"}
        require(is_set, f"data.sets.{name}", given, "write text_set(path, ...), which is in experiments/embed.py")
    sets = training_sets(config.data).values()
    for source in (*sets, dev_set(config.data)):
        source.validate()
    same = "a text and itself have the same score by any teacher; set distill.what=vectors"
    has_scores = not distill.teacher or all(source.form != "sentences" for source in sets)
    require(has_scores or distill.what != "scores", "distill.what", distill.what, same)


TASK = FineTuningTask(
    architecture=ARCHITECTURE,
    inputs=InputForm(range(1, 3), 'texts, or pairs as "A ||| B"'),
    load=load,
    predict=predict,
    validate=validate,
    identity=("head.pooling", "head.dense", "head.dense_act", "head.normalize", "data.form", "distill.what"),
)

"""Vectors of texts, for search, clustering and comparison: an encoder that is trained so that the vectors of texts that
belong together are near each other (Reimers and Gurevych 2019; Gao et al. 2021)."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import ml_collections
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.progress import Bar
from bertjax.config.defaults import fine_tuning_config
from bertjax.config.limits import one_of, require, value_of
from bertjax.data.corpus import holdout
from bertjax.data.loading.examples import Examples
from bertjax.data.loading.mixture import WeightedExamples
from bertjax.embedding import datasets, evaluators, losses
from bertjax.embedding.datasets import ANY, DOCUMENT, FORMS, JUDGES, QUERY, WITH_QUERIES, EncodedTexts, Source, TextSet
from bertjax.embedding.retrieval import Search
from bertjax.finetuning import metrics
from bertjax.finetuning.contamination import seen_in_training
from bertjax.finetuning.encoding import encode_pairs
from bertjax.finetuning.table_summary import TableSummary
from bertjax.finetuning.task import Dataset, FineTuningTask, InputForm, Split
from bertjax.inference import output_layers
from bertjax.inference.output_layers import OutputLayer
from bertjax.inference.vectors import Vectors
from bertjax.interop.pretrained import Pretrained
from bertjax.interop.sentence_transformers import ARCHITECTURE, PACKAGE, SETTINGS
from bertjax.models.heads import SentenceEncoder, model_flops
from bertjax.text.tokenizer import Tokenizer

SECTION = ("path", "form", "texts", "label")  # the fields of a section about a set
READING = ("form", "texts", "label", "widths", "ignore_identical_ids")  # flags that tell how a judging set is read
TAUGHT_AT_ONCE = 1024  # examples, of which a teacher's scores are computed
TO_COSINES = "losses compare vectors by cosines; to learn with these, write 'cosine' to a copy of the folder"
HEAD = ("head.pooling", "head.dense", "head.dense_act", "head.normalize")  # how vectors are made


def output_layer() -> OutputLayer:
    """The vectors of texts, `[batch, width]`; `config.head` sets how they are made of hidden states."""

    def flops(model: SentenceEncoder, sequences: int, length: int) -> int:
        dense = 2 * sequences * model.config.hidden_size * model.dense
        return 3 * (model_flops(model.config, sequences, length, 0, pooled=0) + dense)

    how = dict(flops=flops, supports_packing=True, couples=True, pooled=True)
    return OutputLayer(ARCHITECTURE, SentenceEncoder, None, loss_of=_loss_of, **how)


def _loss_of(config) -> Callable:
    """Returns the loss of a config whose model is known. Raises `UserError` for widths that its vectors have not."""
    return losses.of_settings(config.loss, _widths_of_loss(config, width_of(config)))


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the training sets and the dev set. Raises `UserError` for missing or invalid files."""
    data, notes = config.data, []
    how = prompts_of(config), tokenizer, config.max_seq_length
    sets, texts, dev, held_out = [], [], dev_set(data), frozenset()
    is_file = epath.Path(data.path).is_file()
    if "path" in dev.inherited and is_file and not is_divided(data):
        differs = "data.dev has another form or another first column than data"
        raise UserError(f"config.data.dev.path = '': {differs}; name the file of the dev set, or leave data.dev out")
    for name, source in training_sets(data).items():
        found = datasets.read(source, "train")
        if not name and is_file and is_divided(data):
            held_out, note = _held_out(data, found)
            notes.append(note)
            found = datasets.part(found, held_out, is_inside=False)
        source.require(len(found.texts) > 1, "path", "one example in it; it is compared with others: at least 2")
        encoded = datasets.encode(found, source.form, *how)
        sets.append(WeightedExamples(datasets.training_examples(encoded, found.labels), source.weight))
        texts.append((found, source.form))
        notes += _describe(name or "training", found, encoded, tokenizer, config.max_seq_length)
    found, encoded = _read_judged(dev, ["dev"], held_out, *how)
    notes += _describe("dev", found, encoded, tokenizer, config.max_seq_length)
    trained = itertools.chain.from_iterable(each.texts for each, _ in texts)
    notes += seen_in_training(trained, ("dev examples", found.texts))
    split, metric = evaluators.judged(found, encoded, _widths_of_loss(config, width_of(config)))
    first, *others = sets
    return Dataset(
        output_layer(),
        (),
        first.examples,
        (split,),
        metric,
        tuple(notes),
        others=tuple(others),
        forms=tuple(form for _, form in texts),
        taught=functools.partial(_taught, config, texts) if config.distill.teacher else None,  # holds all texts
    )


def sample(config, input_ids: np.ndarray) -> Dataset:
    """Returns a batch of `config.data`, all texts of which are the same, see `FineTuningTask.sample`."""
    texts, values = datasets.shape_of(config.data)
    one = Examples([input_ids], [np.zeros_like(input_ids)])
    encoded = EncodedTexts(one, np.zeros((config.batch_size, texts), np.int32))
    labels = np.zeros(config.batch_size, values) if values else encoded.numbers
    train = datasets.training_examples(encoded, labels)
    dev = Split(Examples(train.input_ids, train.token_types), score=lambda vectors: {})
    return Dataset(output_layer(), (), train, (dev,), metric="")


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
    if (similarity := similarity_of(teacher.settings)) != "cosine":
        raise UserError(
            f"{says}{SETTINGS}: similarity_fn_name {similarity!r} is not supported in a teacher; {TO_COSINES}"
        )
    of_each = []
    for found, form in sets:
        prompts = prompts_of(teacher.settings)
        encoded = datasets.encode(found, form, prompts, teacher.tokenizer, teacher.max_seq_length)
        vectors = np.stack(output_layers.predict(output_layer(), teacher, encoded.examples))
        if what == "vectors" and (width := vectors.shape[-1]) != (own := width_of(config)):
            raise UserError(
                f"{says}its vectors have {width} numbers, those of this model {own}; set head.dense={width}, or "
                f"distill.what=scores"
            )
        for numbers in np.array_split(encoded.numbers, len(encoded.numbers) // TAUGHT_AT_ONCE + 1):
            said = vectors[numbers]
            of_each.extend(said if what == "vectors" else np.asarray(losses.scores_of(said)))
    return of_each


def is_divided(data) -> bool:
    """Returns whether a tenth of the training set is held out as the dev set, if the training set is one file.

    It is if `data.dev` names no other file and reads the same first texts.
    """
    train, dev = training_sets(data)[""], dev_set(data)
    return "path" in dev.inherited and (dev.form, dev.columns[:1]) == (train.form, train.columns[:1])


def _held_out(data, found: TextSet) -> tuple[frozenset[str], str]:
    """Returns the first texts of the examples of a set that are held out, and the line that states the split.

    Raises `UserError` if the file has too few examples.
    """
    named = "queries" if data.form in WITH_QUERIES else "texts"
    labels: dict[str, set] = {}  # of the examples of each first text; scores are no labels
    has_labels = FORMS[data.form].values is np.int32
    values = found.values.tolist() if has_labels else itertools.repeat(None)
    for (first, *_), value in zip(found.texts, values):
        labels.setdefault(first, set()).add(value)
    firsts = list(labels)
    chosen = holdout.choose([sorted(each) if has_labels else () for each in labels.values()], holdout.seed_of(data))
    least = holdout.MIN_FOR_CORRELATION if FORMS[data.form].values is np.float32 else 1
    holdout.require(len(chosen), len(firsts), data, named, least)
    held_out = frozenset(firsts[number] for number in chosen)
    dev = datasets.part(found, held_out)
    if dev.values is not None and (dev.values == dev.values[0]).all():
        raise UserError(
            f"config.data.path = {data.path!r}: all {len(dev.texts)} held-out examples have {data.label} = "
            f"{dev.values[0]:g}, by which nothing can be judged; name a dev set with config.data.dev.path"
        )
    line = holdout.describe(len(chosen), len(firsts), data, named, data.label if has_labels else "")
    return held_out, f"{line}, with {len(found.texts) - len(dev.texts):,} and {len(dev.texts):,} examples"


def _read_judged(
    source: Source, parts: Sequence[str], held_out: Collection[str], *how
) -> tuple[TextSet | Search, EncodedTexts]:
    """Reads and encodes a set that vectors are judged by, or the part of it with the first texts that are held out."""
    if source.form in WITH_QUERIES:
        found = datasets.read_search(source, *parts, held_out=held_out)
        return found, datasets.encode_search(found, *how)
    found = datasets.read(source, *parts)
    found = datasets.part(found, held_out) if held_out else found
    return found, datasets.encode(found, source.form, *how)


def _describe(name: str, found: TextSet | Search, encoded: EncodedTexts, tokenizer: Tokenizer, most: int) -> list[str]:
    """Returns the lines to print about a set."""
    if isinstance(found, Search):
        used, how = len(found.queries), dict(rows="queries")
    else:
        used, how = len(found.texts), dict(skipped=found.skipped)
    summary = TableSummary(name, used, encoded.examples, tokenizer, texts="texts", lost=encoded.lost, **how)
    return [f"{found.describe(name)}: {len(encoded.examples)} texts", *summary.lines(most)]


def labelled(source: Pretrained, path: str, widths: str | None = None, **said: str) -> tuple[OutputLayer, Split]:
    """Returns the output layer of a checkpoint, and a set at a path with how vectors are judged by it.

    `widths` and `said` are what the flags of `READING` say; else the set is like the dev set of the run, if it is one.
    Of the one file that the run has read, the examples are the held-out ones.
    """
    settings, given = source.settings, datasets.PAIRS | {"form": ""}
    held_out, note = frozenset(), ""
    if "dev" in (data := settings.get("data", {})):
        dev = dev_set(data)
        given = {name: getattr(dev, name) for name in (*SECTION, "ignore_identical_ids")}
    judging = datasets.Flagged("", **given | said | {"path": path})
    judging.validate(JUDGES)
    if widths is None:
        widths = settings.get("loss", {}).get("widths", "")
    widths = widths_of(widths, f"--widths={widths}", _width(source.head, source.config))
    how = prompts_of(settings), source.tokenizer, source.max_seq_length
    if "dev" in data and is_divided(data) and not said and holdout.is_file_of_run(path, data, source.fingerprints):
        trained = dataclasses.replace(training_sets(data)[""], path=path)
        held_out, note = _held_out(data, datasets.read(trained, "train"))
    found, encoded = _read_judged(judging, ["test", "dev"], held_out, *how)
    split, _ = evaluators.judged(found, encoded, widths, source.decided or None, similarity_of(settings))
    notes = filter(None, [note, *_describe("labelled", found, encoded, *how[1:])])
    return output_layer(), dataclasses.replace(split, note="\n".join(notes))


def training_sets(data) -> dict[str, Source]:
    """Returns the training sets by name; that of `config.data` itself is "" and comes first."""
    own = Source("data", **{name: data[name] for name in SECTION})
    return {"": own, **{name: Source(f"data.sets.{name}", **given) for name, given in data.sets.items()}}


def dev_set(data) -> Source:
    """Returns the dev set: what `data.dev` does not say is as in training."""
    inherited = frozenset(name for name in SECTION if not data.dev[name])
    given = {name: (data if name in inherited else data.dev)[name] for name in SECTION}
    ignore = bool(data.dev.get("ignore_identical_ids"))  # Older runs have no such field.
    return Source("data.dev", **given, inherited=inherited, ignore_identical_ids=ignore)


def prompts_of(settings) -> dict[str | None, str]:
    """Returns the prompts of a run, or of a folder of sentence-transformers, by name.

    A text that is neither a query nor a document has `ANY`: in a run the prompt of queries, in a folder the default
    prompt, as `SentenceTransformer.encode` has it.
    """
    data, folder = settings.get("data", {}), settings.get(PACKAGE, {})
    query, named = data.get("query_prompt", ""), dict(folder.get("prompts", ()))
    default = named.get(folder["default_prompt_name"], "") if folder else query
    return {**named, QUERY: query, DOCUMENT: data.get("document_prompt", ""), ANY: default}


def similarity_of(settings) -> str:
    """Returns how vectors are compared, see `metrics.comparable`: in a run by cosines."""
    return settings.get(PACKAGE, {}).get("similarity_fn_name", "cosine")


def widths_of(text: str, said: str, most: float = math.inf) -> tuple[int, ...]:
    """Returns the widths that a text lists. Raises `UserError`, which begins with what says it, if it does not, or if
    vectors have at most so many numbers."""
    widths = tuple(filter(None, map(str.strip, text.split(","))))
    if not all(width.isdecimal() and int(width) for width in widths):
        raise UserError(f"{said}: write widths such as 256,128,64")
    if more := [width for width in widths if int(width) > most]:
        raise UserError(f"{said}: {more[0]} is more than the {most} numbers of a vector")
    return tuple(map(int, widths))


def _widths_of_loss(config, most: float = math.inf) -> tuple[int, ...]:
    return widths_of(config.loss.widths, f"config.loss.widths = {config.loss.widths!r}", most)


def width_of(config) -> int:
    """Returns how many numbers a vector has."""
    return _width(config.head, config.model)


def _width(head, model) -> int:
    width = head["dense"] or model.hidden_size
    return min(width, head.get("truncate_dim") or width)


def vectors_of_search(source: Pretrained, search: Search) -> tuple[np.ndarray, np.ndarray]:
    """Returns the vectors of queries and those of documents; shows the progress."""
    sides = (QUERY, search.queries), (DOCUMENT, search.documents)
    with Bar("vectors", [len(texts) for _, texts in sides], " texts") as bar:
        made = list(_of_kinds(source, *sides, bar=bar))
    for named, (_, cut) in zip(("queries", "documents"), made):
        if any(cut):
            print(f"{sum(cut)} of {len(cut)} {named} truncated to {source.max_seq_length} tokens", flush=True)
    return tuple(vectors for vectors, _ in made)


def _of_kinds(
    source: Pretrained, *sides: tuple[str | None, Sequence[str]], bar: Bar | None = None
) -> Iterator[tuple[np.ndarray, list[bool]]]:
    """Yields the vectors of texts of each kind, `QUERY`, `DOCUMENT` or `ANY`, and which texts were truncated."""
    make, prompts = vectors_of(source, prompt=""), prompts_of(source.settings)  # compiled once
    for kind, texts in sides:
        yield make([prompts[kind] + text for text in texts], bar)


def vectors_of(source: Pretrained, prompt: str | None = None, width: int = 0) -> Vectors:
    """Returns how a checkpoint makes vectors.

    Args:
      prompt: what comes before each text: the name of a prompt, such as `QUERY` or `DOCUMENT`, or the words themselves;
        None: that of `ANY`, see `prompts_of`.
      width: keeps the first `width` numbers, normalized anew if vectors are; 0: all.

    Raises `UserError` if vectors are not so wide.
    """
    words, head = prompts_of(source.settings).get(prompt, prompt), source.head
    if width > (most := _width(head, source.config)):
        raise UserError(f"--width={width}: the vectors of {source.path} have {most} numbers")

    def encode(texts: list[str]):
        return encode_pairs(source.tokenizer, [words + text for text in texts], None, source.max_seq_length)

    def finish(found: np.ndarray) -> np.ndarray:
        if width in (0, most):
            return found
        return metrics.l2_normalize(found[:, :width]) if head["normalize"] else found[:, :width]

    flags = {"prompt": words, "width": str(width or most)}
    return Vectors(source, output_layer(), encode, finish, flags)


def predict(source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
    """Yields the `vector` of each text, or the `cosine` or `dot` product of each pair, and `cut` if truncated.

    A text has the prompt `ANY` before it. The texts of a pair have the prompts `QUERY` and `DOCUMENT`, unless the form
    of the run's pairs has no documents.
    """
    data = source.settings.get("data", {})
    is_search = "form" not in data or FORMS[data.form].is_search
    kinds = (QUERY, DOCUMENT) if is_search and len(texts[0]) == 2 else (ANY, ANY)
    similarity = similarity_of(source.settings)
    sides = list(_of_kinds(source, *zip(kinds, zip(*texts))))
    for *found, were_cut in zip(*(vectors for vectors, _ in sides), zip(*(cut for _, cut in sides))):
        more = {"cut": True} if any(were_cut) else {}
        if len(found) == 1:
            yield {"vector": found[0].tolist(), **more}
        else:
            first, second = (metrics.comparable(vector, similarity) for vector in found)
            yield {similarity: float(first @ second), **more}


def adopt(config, theirs) -> list[str]:
    """Takes how vectors are made, prompts and `max_seq_length` where the config has its defaults; returns what it took.

    A default cannot be told from a flag, and says nothing. Raises `UserError` for vectors that are compared otherwise
    than the losses compare them.
    """
    if (similarity := similarity_of(theirs)) != "cosine":
        where = f"config.init_checkpoint = {config.init_checkpoint!r}: {SETTINGS}: similarity_fn_name {similarity!r}"
        raise UserError(f"{where} is not supported in training; supported: 'cosine'; {TO_COSINES}")
    default = {f"head.{each.name}": each.default for each in dataclasses.fields(SentenceEncoder)}
    default |= {f"data.{kind}_prompt": "" for kind in (QUERY, DOCUMENT)}
    default["max_seq_length"] = fine_tuning_config("").max_seq_length
    taken = []
    for name in (*HEAD, "data.query_prompt", "data.document_prompt", "max_seq_length"):
        value = value_of(theirs, name)
        if value_of(config, name) == default[name] != value:
            section, _, field = name.rpartition(".")
            (config[section] if section else config)[field] = value
            taken.append(f"{name} = {value!r}")
    if width := theirs.head.get("truncate_dim"):  # which only folders of sentence-transformers have
        with config.head.unlocked():
            config.head.truncate_dim = width
        taken.append(f"head.truncate_dim = {width}")
    return taken


def validate(config) -> None:
    one_of(config, "head.pooling", ("mean", "cls", "last"))
    one_of(config, "head.dense_act", ("none", "tanh"))
    dense, loss, distill = config.head.dense, config.loss, config.distill
    require(dense >= 0, "head.dense", dense, "must be the width of a dense layer, or 0 for none")
    require(loss.temperature > 0, "loss.temperature", loss.temperature, "must be above 0")
    require(0 < loss.margin <= 2, "loss.margin", loss.margin, "must be above 0 and at most 2: a cosine's range")
    _widths_of_loss(config)
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
    dev = dev_set(config.data).form
    judging = f"texts by themselves judge nothing; set data.dev.path, and data.dev.form to one of {', '.join(JUDGES)}"
    require(dev in JUDGES, "data.dev.form", dev, judging)
    same = "a text and itself have the same score by any teacher; set distill.what=vectors"
    has_scores = not distill.teacher or all(source.form != "sentences" for source in sets)
    require(has_scores or distill.what != "scores", "distill.what", distill.what, same)


TASK = FineTuningTask(
    architecture=ARCHITECTURE,
    inputs=InputForm(range(1, 3), 'texts, or pairs as "A ||| B"'),
    load=load,
    predict=predict,
    output_layer=lambda source: output_layer(),
    validate=validate,
    labelled=labelled,
    reading=READING,
    adopt=adopt,
    continued=("projection",),
    vectors=vectors_of,
    vectors_of_search=vectors_of_search,
    weightless=True,
    sample=sample,
    identity=(*HEAD, "data.form", "data.heldout_seed", "distill.what"),
)

"""The public Python API: use, train, evaluate, convert. `import bertjax` imports this module on first use.

`load` reads a checkpoint as a `Model`, which predicts, computes embeddings, and has the network as a pure function. The
functions do the work of the commands with the same names.
"""

import contextlib
import dataclasses
import functools
import numbers
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from ml_collections import ConfigDict
from numpy.typing import ArrayLike, NDArray

from bertjax.common import surrogates
from bertjax.common.errors import UserError
from bertjax.common.files import require_new_folder
from bertjax.config import experiments
from bertjax.config.model_config import BertConfig
from bertjax.distributed.mesh import compute_for
from bertjax.distributed.topology import available_cores
from bertjax.export import network
from bertjax.inference import abilities, fill_mask, generation
from bertjax.inference.fill_mask import Filled
from bertjax.inference.task import FineTuningTask, HasEmbeddings
from bertjax.inference.text_embedding import PooledStatesEmbedder, TextEmbedder
from bertjax.interop import pretrained
from bertjax.interop.pretrained import Pretrained
from bertjax.launch.overrides import find_field, note_overrides
from bertjax.launch.tables import use_tables
from bertjax.launch.validate import validate
from bertjax.nn.layer_pooling import WITHOUT_WEIGHTS, check_layers
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.hooks.hook import Hook
from bertjax.training.hooks.registry import check_hooks
from bertjax.training.scores import Scores

Path = str | os.PathLike[str]
Config: TypeAlias = str | os.PathLike[str] | ConfigDict  # the name of an experiment, a Python file, or a config itself
Params = dict[str, Any]
Texts = str | Iterable[str]
Parts = str | Iterable[str | tuple[str, ...]]  # texts that may have several parts, such as pairs
POOLS = ("mean", "cls", "last")
CONVERT_FORMATS = ("bertjax", "huggingface", "sentence-transformers", "tf1", "peft", "stablehlo", "onnx")


class Classified(TypedDict, total=False):
    """What a text or a pair is: a class, several labels, or a number (`score`); `cut` if it was truncated."""

    label: str
    labels: list[str]
    probabilities: dict[str, float]
    score: float
    cut: bool


class Entity(TypedDict):
    """An entity of a text; `start` and `end` are characters."""

    type: str
    text: str
    start: int
    end: int


class Tagged(TypedDict, total=False):
    """The words of a text, their tags and places (start and end characters); `entities` if all tags are BIO."""

    words: list[str]
    tags: list[str]
    offsets: list[list[int]]
    entities: list[Entity]


class Answer(TypedDict, total=False):
    """An answer, "" if there is none, with its characters in the context; `cut` if the question was truncated."""

    answer: str
    start: int
    end: int
    probability: float
    null_odds: float | None
    cut: bool


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A checkpoint to use: its predictions for texts, and its network.

    Methods that take `texts`, one or several, return a list in their order; several are computed in batches. A method
    raises `UserError` if the checkpoint was not trained for it; the message lists the methods that work.

    Args:
      source: all that is known of the checkpoint; its params are on one device.
    """

    source: Pretrained

    def __repr__(self) -> str:
        return f"bertjax.Model({self.path!r})"

    @property
    def path(self) -> str:
        """Where it lies, such as runs/mine@500000."""
        return self.source.path

    @property
    def params(self) -> Params:
        """Arrays in a nested dict."""
        return self.source.params

    @property
    def config(self) -> BertConfig:
        """The config of the model, that of its family."""
        return self.source.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which also says the ids of its special pieces."""
        return cast(Tokenizer, self.source.tokenizer)  # `load` requires one

    # What it says of texts.

    def fill_mask(self, texts: Texts, top_k: int = 5) -> list[Filled]:
        """Returns each text with the `top_k` likeliest words for each [MASK] of it, and their probabilities."""
        self._require("fill_mask")
        _check_number("top_k", top_k, 1)
        return list(fill_mask.predict_masks(self.source, _plain(texts), top_k))

    def generate(
        self,
        texts: Texts,
        pieces: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Continues each text by up to `pieces` pieces; `generation.Sampling` describes the other arguments."""
        self._require("generate")
        for name, value, least in (("pieces", pieces, 0), ("top_k", top_k, 0)):
            _check_number(name, value, least)
        _check_number("seed", seed, 0, 2**31 - 1)
        _check_number("temperature", temperature, 0, kinds=numbers.Real)
        _check_number("top_p", top_p, 1e-6, 1, kinds=numbers.Real)
        sampling = generation.Sampling(temperature, top_k, top_p)
        return list(generation.continue_texts(self.source, _plain(texts), pieces, sampling, seed))

    def classify(self, texts: Parts) -> list[Classified]:
        """Returns what each text, or pair of texts, is."""
        self._require("classify")
        return cast(list[Classified], self.predict(texts))

    def tag(self, texts: Texts) -> list[Tagged]:
        """Returns the words of each text with their tags, and the entities."""
        self._require("tag")
        return cast(list[Tagged], self.predict(texts))

    def answer(self, question: str, context: str) -> Answer:
        """Returns the answer to a question in a text; `predict` takes a list of such pairs."""
        self._require("answer")
        (found,) = self.predict([(question, context)])
        return cast(Answer, found)

    def predict(self, texts: Parts) -> list[dict[str, Any]]:
        """Returns the predictions of a fine-tuned checkpoint, one object for each text or tuple of parts of a text.

        The objects are those that `bertjax predict` prints.
        """
        self._require("predict")
        task, parts = cast(FineTuningTask, self._task), _parts(texts)
        task.inputs.check(parts)
        return list(task.predict(self.source, parts)) if parts else []

    def embed(
        self, texts: Texts, prompt: str | None = None, width: int = 0, pool: str = "", layers: str = ""
    ) -> NDArray[np.float32]:
        """Returns vectors of texts `[texts, width]`: those that the checkpoint has learnt to make, or hidden states.

        Args:
          prompt: what comes before each text: "query", "document", another prompt of a folder of
            sentence-transformers, or the words themselves; None: in a run "query", in such a folder its default prompt.
          width: keeps the first `width` numbers of vectors that were trained for it, normalized anew; 0: all.
          pool: mean, cls or last makes a vector of a text's hidden states, with any checkpoint and without prompts.
          layers: which hidden states, with `pool`: last unless given, as sentence-transformers does.
        """
        _check_number("width", width, 0)
        prompt = surrogates.replaced(prompt) if isinstance(prompt, str) else prompt
        make, given = self._vectors(prompt, width, pool, layers), _plain(texts)
        return make(given)[0] if given else np.zeros((0, width), np.float32)

    # Files.

    def save(self, folder: Path, format: str = "") -> str:
        """Writes the checkpoint to a new folder in another format, see `bertjax.convert`; returns a summary.

        Args:
          folder: the folder; it must be new or empty.
          format: the format; by default huggingface, or sentence-transformers for a model of embeddings.
        """
        return convert(self.path, folder, format or self._format)

    def push(self, repository: str, private: bool = False, format: str = "") -> str:
        """Pushes the checkpoint to a repository USER/NAME of the Hugging Face hub; returns a summary.

        Args:
          repository: the repository, which is created if it does not exist.
          private: whether a new repository is private.
          format: huggingface or sentence-transformers; by default as for `save`.
        """
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "model")
            return convert(self.path, output, format or self._format, push=repository, private=private)

    @property
    def _format(self) -> str:
        return "sentence-transformers" if self.makes_vectors else "huggingface"

    # The network.

    def apply(
        self,
        params: Params,
        input_ids: ArrayLike,
        segments: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the outputs of the checkpoint's own output layer; a pure function, to be compiled or differentiated.

        Args:
          params: such as `self.params`.
          input_ids: `[batch, length]`, with [CLS] and [SEP]; for multiple choice `[batch, choices, length]`.
          segments: 1 for tokens, 0 for padding, see `EncoderModel.encode`; None: all that is not [PAD] is a token.
          token_types: 1 in the second text of a pair; None: 0 everywhere.
          dropout_keys: `[batch]` random keys; None: no dropout.

        Returns logits of words `[batch, length, vocab]` (of a model that predicts both neighbours those of the next
        words, then those of the words before), of classes `[batch, labels]`, of tags `[batch, length, labels]`, of the
        ends of answers `[batch, length, 2]`; vectors `[batch, width]`; without such a layer, what `encode` does.
        """
        return self._outputs(params, self._batch(input_ids, segments, token_types), dropout_keys)

    def encode(
        self,
        params: Params,
        input_ids: ArrayLike,
        segments: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        """As `apply`, but returns the last hidden states `[batch, length, hidden]`."""
        return self._states(params, self._batch(input_ids, segments, token_types), dropout_keys)

    def _batch(
        self, input_ids: ArrayLike, segments: ArrayLike | None, token_types: ArrayLike | None
    ) -> dict[str, jax.Array]:
        ids = jnp.asarray(input_ids, jnp.int32)
        segments = ids != self.tokenizer.pad_id if segments is None else segments
        token_types = jnp.zeros_like(ids) if token_types is None else token_types
        given = {"input_ids": ids, "segments": segments, "token_types": token_types}
        return {name: jnp.asarray(x, jnp.int32) for name, x in given.items()}

    @functools.cached_property
    def _outputs(self) -> network.Function:
        return network.outputs(self.source, compute_for(self.source.dtype))

    @functools.cached_property
    def _states(self) -> network.Function:
        return network.states(self.source, compute_for(self.source.dtype))

    # What there is.

    @functools.cached_property
    def _task(self) -> FineTuningTask | None:
        return abilities.task_of(self.source)

    @functools.cached_property
    def _methods(self) -> list[str]:
        return abilities.methods_of(self.source)

    @property
    def methods(self) -> list[str]:
        """The names of those methods that need something learnt, as far as the checkpoint has learnt it."""
        return [*self._methods]

    @property
    def makes_vectors(self) -> bool:
        """Whether it has learnt to make vectors of texts, so that `embed` needs no `pool`."""
        with contextlib.suppress(UserError):  # a task that is not registered here
            return isinstance(self._task, HasEmbeddings)
        return False

    def _require(self, method: str) -> None:
        """Raises `UserError` if the checkpoint has not learnt what a method needs."""
        if method not in self.methods:
            can = ", ".join([*self.methods, "embed", "encode and apply"])
            raise UserError(f"{self.path}: has not learnt what {method} needs; there are {can}")

    def _vectors(self, prompt: str | None, width: int, pool: str, layers: str) -> TextEmbedder:
        if pool:
            for name, given in (("prompt", prompt), ("width", width)):
                if given:
                    raise UserError(
                        f"{name} = {given!r}: is for vectors that a checkpoint makes without pool; leave it out"
                    )
            if pool not in POOLS:
                raise UserError(f"pool = {pool!r}: choose one of {', '.join(POOLS)}")
            if layers and layers not in WITHOUT_WEIGHTS:
                raise UserError(f"layers = {layers!r}: choose one of {', '.join(WITHOUT_WEIGHTS)}")
            check_layers(layers or "last", self.config, "layers")
            return PooledStatesEmbedder(self.source, layers or "last", pool)
        if not self.makes_vectors:
            raise UserError(f"{self.path}: has not learnt to make vectors; pool='mean' makes some of hidden states")
        if layers:
            raise UserError(f"layers = {layers!r}: is for vectors of hidden states; give pool='mean' as well")
        return cast(HasEmbeddings, self._task).embedder(self.source, prompt, width)


def load(path: Path, dtype: str | None = None) -> Model:
    """Loads a checkpoint, with its tokenizer.

    Args:
      path: a run's workdir (also WORKDIR@best, @latest, @STEP), a folder of Hugging Face or sentence-transformers,
        hub:NAME[@REVISION], or Google's bert_model.ckpt.
      dtype: type to compute in, as `config.dtype`; that of the run unless given.

    Raises `UserError` if there is none, or if it is damaged.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"path = {path!r}: is no path; give a str")
    with _silence():
        source = pretrained.read_with_tokenizer(path, dtype)
    return Model(dataclasses.replace(source, params=jax.device_put(source.params)))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Silences what libraries log through absl, as the commands do: they also raise what they log."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def train(
    config: Config,
    workdir: Path | None = None,
    overrides: Mapping[str, Any] = {},
    hooks: Sequence[Hook] = (),
    data: Any = None,
) -> epath.Path:
    """Pre-trains, fine-tunes or searches as a config says, resuming an earlier run in `workdir`; returns the workdir.

    It prints what `bertjax.main` prints. Ctrl-C saves a checkpoint and raises `KeyboardInterrupt`.

    Args:
      config: the name of an experiment, such as "small:mini", the path of a Python file, or a config, which is not
        changed.
      workdir: the folder of the run; runs/NAME unless given, where a config has a name.
      overrides: {field: value}, such as {"stages.short.steps": 100}.
      hooks: objects that the training loop calls, see `bertjax.training.hooks.Hook`. A search calls them in each trial.
      data: the data in place of `data.path` or `data.corpus`: a pandas or polars DataFrame, a `datasets.Dataset`, or an
        iterable of dicts; or {"train": ..., "dev": ...}. The tables are written to WORKDIR/data as JSON lines. Without
        a dev table, a tenth of the rows is held out. For the tasks `classify`, `tag` and `embed`, and for pre-training.

    Raises `UserError` for mistakes in the config, and for a workdir with another run.
    """
    check_hooks(hooks)
    whole = _config(config, overrides)
    if workdir is None:
        if isinstance(config, ConfigDict):
            raise UserError("workdir: name the folder of the run; a config by itself has no name")
        workdir = f"runs/{experiments.name(os.fspath(config))}"
    if data is not None:
        use_tables(whole, data, workdir)
    validate(whole)

    from bertjax.launch.start import launch
    from bertjax.reporting.page import draw

    launch(whole, workdir, draw=draw, hooks=hooks)
    return epath.Path(workdir)


def evaluate(
    checkpoint: Path,
    data: Path,
    dtype: str | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    **description: str | bool | None,
) -> Scores:
    """Scores a checkpoint on a labelled file, without training.

    Args:
      checkpoint: the checkpoint, as for `load`.
      data: a file like the dev set of the run; for embeddings also a folder, such as a folder of BEIR.
      dtype: the type to compute in, as for `load`.
      on_note: receives lines about the examples, such as `print`, before they are scored.
      **description: the form of the data of embeddings, as the flags of `bertjax evaluate`: form, texts, label, widths,
        ignore_identical_ids.

    Raises:
      UserError: if the checkpoint does not determine how the file is read, or if the file is invalid.
    """
    from bertjax.finetuning.evaluation import score_file

    with _silence():
        source = pretrained.read_with_tokenizer(checkpoint, dtype)
    return score_file(source, os.fspath(data), on_note, **description)


def convert(
    source: Path,
    output: Path,
    format: str,
    *,
    architecture: str = "",
    license: str = "",
    part: str = "",
    base: str = "",
    push: str = "",
    private: bool = False,
    int8: bool = False,
) -> str:
    """Converts a checkpoint to another format.

    Args:
      source: the checkpoint, as for `load`.
      output: the folder to write; it must be new or empty.
      format: bertjax, huggingface, sentence-transformers, tf1, peft, stablehlo or onnx.
      architecture: for huggingface, the transformers class; "" for the class that keeps most weights.
      license: the license in the model card, such as apache-2.0.
      part: a model that the run has trained beside its own, to write instead.
      base: for peft, the name of the base on the hub, USER/NAME[@REVISION].
      push: USER/NAME of a repository on the hub, to which the folder is pushed.
      private: whether a new repository is private.
      int8: for onnx, writes a model with 8-bit weights as well.

    Returns:
      A summary in one line.

    Raises:
      UserError: if the format cannot contain the model, if an option does not apply to the format, or if the push
        fails.
    """
    if format not in CONVERT_FORMATS:
        raise UserError(f"format = {format!r}: choose one of {', '.join(CONVERT_FORMATS)}")
    if int8 and format != "onnx":
        raise UserError("--int8: only for --format=onnx")
    require_new_folder(output)  # before a model is read, which can take minutes
    if format not in ("stablehlo", "onnx"):
        from bertjax.interop import conversion

        return conversion.convert(source, output, format, architecture, license, part, push, private, base)
    options = dict(architecture=architecture, license=license, part=part, base=base, push=push, private=private)
    if wrong := next((name for name, value in options.items() if value), None):
        raise UserError(f"--{wrong}: not for --format={format}")
    from bertjax.export import onnx, stablehlo

    checkpoint = pretrained.read_with_tokenizer(source)
    return onnx.write(output, checkpoint, int8) if format == "onnx" else stablehlo.write(output, checkpoint)


def mine(
    checkpoint: Path,
    data: Path,
    output: Path,
    *,
    corpus: Path | None = None,
    form: str = "pairs",
    texts: str = "anchor,positive",
    negatives: int = 1,
    first: int = 1,
    last: int = 100,
    margin: str | float = "-inf",
    min_score: float = -np.inf,
    max_score: float = np.inf,
    seed: int | None = None,
    dtype: str | None = None,
) -> list[str]:
    """Mines hard negatives with the embeddings of a checkpoint, and writes them to a table.

    For each query, finds the nearest documents that are not relevant to the query. The table has the columns anchor,
    positive, negative_1, ..., which the experiment `embed` trains on.

    Args:
      checkpoint: the checkpoint, as for `load`.
      data: a file of queries and documents, or a folder with such a train file.
      output: the .jsonl, .csv or .tsv file to write.
      corpus: a file with more documents.
      form: the form of the examples of `data`, as `config.data.form`.
      texts: the columns of the texts of `data`, as `config.data.texts`.
      negatives: the number of negatives of a query.
      first: the rank of the first document that can be a negative; 1 is the nearest document.
      last: the rank of the last document that can be a negative.
      margin: the least difference of the cosines of the positive and of a negative, such as 0.1, or 5% of the positive.
      min_score: the least cosine of a negative.
      max_score: the largest cosine of a negative.
      seed: the seed of a draw among the ranks; None takes the nearest documents.
      dtype: the type to compute in, as for `load`.

    Returns:
      Lines with the numbers of dropped candidates and queries.

    Raises:
      UserError: for an invalid file or choice, or a checkpoint without embeddings.
    """
    from bertjax.embedding.hard_negatives import make_choice, mine_files

    choice = make_choice(negatives, first, last, margin, min_score, max_score, seed)
    corpus_path = None if corpus is None else os.fspath(corpus)
    paths = (os.fspath(checkpoint), os.fspath(data), os.fspath(output))
    _, _, lines = mine_files(*paths, choice, corpus_path, form, texts, dtype)
    return lines


def prepare(
    config: Config,
    output: Path,
    workers: int | None = None,
    overrides: Mapping[str, Any] = {},
    beam_options: list[str] | None = None,
) -> epath.Path:
    """Writes the records of every stage of a config, and their tokenizer, to a folder; returns it.

    Training with `data.records` set to it reads them. In a script, call it under `if __name__ == "__main__"`: its
    workers are processes that import the script.

    Args:
      config: the experiment or config, as for `train`.
      overrides: {field: value}, as for `train`.
      output: must not hold finished records.
      workers: processes; all cores unless given.
      beam_options: runs on Apache Beam with these options, such as ["--runner=DataflowRunner"].

    Raises `UserError` for mistakes in the config, and if the corpus has too few documents.
    """
    from bertjax.data.preprocessing import preparation
    from bertjax.launch.budget import plan
    from bertjax.pretraining.init_checkpoint import resolve_checkpoint
    from bertjax.pretraining.validate import validate_pretraining

    whole = _config(config, overrides)
    validate_pretraining(whole)  # refuses tasks other than pre-training
    validate(whole)
    whole = plan.with_sizes(whole)
    whole, _ = resolve_checkpoint(whole)
    preparation.prepare(whole, output, available_cores() if workers is None else workers, beam_options)
    return epath.Path(output)


def _config(given: Config, overrides: Mapping[str, Any]) -> ConfigDict:
    """Returns a config of our own. Raises `UserError` for overrides that it has no field for, or of another type."""
    if isinstance(given, ConfigDict):
        config = given.copy_and_resolve_references().lock()
    else:
        config = experiments.load(os.fspath(given))
    width = config.get("model", {}).get("hidden_size")
    for name, value in overrides.items():
        try:
            find_field(config, name).set(value)
        except UserError as error:
            raise UserError(f"{name} = {value!r}: {error}") from None
    note_overrides(config, overrides, width)
    return config


def _plain(texts: Texts) -> list[str]:
    """Returns texts as a list. Raises `UserError` if one is not a str."""
    found = _listed(texts)
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise UserError(f"texts[{number}] = {text!r}: is no text; give a str")
    return [surrogates.replaced(text) for text in found]


def _parts(texts: Parts) -> list[tuple[str, ...]]:
    """Returns texts as tuples of their parts. Raises `UserError` if a part is not a str."""
    found = _listed(texts)
    divided = [tuple(each) if isinstance(each, list | tuple) else (each,) for each in found]
    for number, parts in enumerate(divided):
        if not all(isinstance(part, str) for part in parts):
            raise UserError(f"texts[{number}] = {found[number]!r}: is neither a text nor a tuple of texts; give a str")
    return [tuple(map(surrogates.replaced, parts)) for parts in divided]


def _listed(texts: Any) -> list[Any]:
    """Returns one text, or several, as a list. Raises `UserError` for another type."""
    if isinstance(texts, str):
        return [texts]
    try:
        if isinstance(texts, bytes | bytearray | Mapping):
            raise TypeError
        return list(iter(texts))
    except TypeError:
        raise UserError(f"texts = {texts!r:.60}: is no text; give a str, or a list of them") from None


def _check_number(name: str, value: Any, least: float, most: float = np.inf, kinds: Any = (int, np.integer)) -> None:
    """Raises `UserError` unless an option is a number of these types and in this range."""
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        kind = "an integer" if kinds is not numbers.Real else "a number"
        limit = f"from {least} to {most}" if most < np.inf else f"of at least {least}"
        raise UserError(f"{name} = {value!r}: must be {kind} {limit}")

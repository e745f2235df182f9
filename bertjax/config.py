"""The defaults, the named model sizes, and every check of a config.

A config is an `ml_collections.ConfigDict`, locked, so that a misspelt field is an error. An experiment starts from
`default_config()` and says only what differs. `validate()` runs before any file or device is touched.
"""

import dataclasses
from collections.abc import Sequence

import ml_collections
from ml_collections import config_dict


class UserError(Exception):
    """A mistake that the user can mend. The commands print its one line and exit; nobody sees a traceback."""


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The shape of a BERT. Field names are those of Google's and Hugging Face's `bert_config.json`."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_new"  # the tanh form, as Google's modeling.gelu; Hugging Face's "gelu" is the erf form
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding table: `vocab_size` rounded up to whole TPU lanes of 128."""
        return -(-self.vocab_size // 128) * 128


ACTIVATIONS = ("gelu", "gelu_new", "relu")
OPTIMIZERS = ("adam", "lamb")
TOKENIZER_KINDS = ("wordpiece", "sentencepiece")
REMAT_POLICIES = ("none", "dots", "full")
DTYPES = ("auto", "float32", "bfloat16")
FINE_TUNING_TASKS = ("glue", "classify", "squad", "ner", "tag", "swag", "features")  # each a module of bertjax.tasks
# The rows of the paper's table 7: which of `[layers + 1, ...]` hidden states, the embeddings first.
FEATURE_LAYERS = {
    "embeddings": slice(0, 1),
    "second_to_last": slice(-2, -1),
    "last": slice(-1, None),
    "weighted_sum_last_four": slice(-4, None),
    "concat_last_four": slice(-4, None),
    "weighted_sum_all": slice(1, None),
}
SQUAD_VERSIONS = ("v1.1", "v2.0")
GLUE_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax")

# (layers, hidden size, heads). base and large: Devlin et al. 2019, section 3; the others: Turc et al. 2019, table 1.
SIZES = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


def model_size(name: str) -> dict:
    """The `config.model` fields of a published size. Raises `UserError` for a name that is not in `SIZES`."""
    if name not in SIZES:
        raise UserError(f"unknown model size {name!r}: choose one of {', '.join(SIZES)}")
    layers, hidden, heads = SIZES[name]
    return dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden)


def stage(steps: int, length: int, max_predictions_per_seq: int) -> ml_collections.ConfigDict:
    """One stage of pre-training: `steps` updates on sequences of `length` tokens."""
    return ml_collections.ConfigDict(dict(steps=steps, length=length, max_predictions_per_seq=max_predictions_per_seq))


def default_config() -> ml_collections.ConfigDict:
    """BERT-base pre-training as published (Devlin et al. 2019, appendix A.2), without a corpus."""
    config = ml_collections.ConfigDict()
    config.task = "pretraining"
    config.seed = 0
    config.batch_size = 256  # sequences a step, over all devices and hosts
    config.microbatches = 1  # a batch is worked through in this many pieces, their gradients summed
    # 90 % of the steps at length 128, the rest at 512. 77 = ceil(0.15 * 512): no masked token is ever cut off.
    config.stages = (stage(900_000, 128, 20), stage(100_000, 512, 77))
    config.model = ml_collections.ConfigDict(dataclasses.asdict(BertConfig()))
    config.init_checkpoint = ""  # start from these weights instead of random ones
    config.dtype = "auto"  # of activations: bfloat16 on TPU and GPU, float32 on CPU; params are always float32
    config.grad_dtype = "float32"  # that gradients are added up in between devices; bfloat16 halves the traffic
    config.remat = "none"  # what the backward pass recomputes to save memory: none | dots | full
    config.mesh = ml_collections.ConfigDict(dict(data=-1, fsdp=1, tensor=1))  # -1: the devices that are left

    config.hosts_timeout = 300  # seconds that a run of several hosts waits for all of them to start

    # Text -> ids. An empty path: a vocabulary of model.vocab_size is learnt from data.corpus.
    config.tokenizer = ml_collections.ConfigDict(dict(kind="wordpiece", path="", lowercase=True))

    # Ids -> records. Names as in Google's create_pretraining_data.py, where it has one.
    config.data = ml_collections.ConfigDict(
        dict(
            corpus=config_dict.placeholder(object),  # file, folder, glob, gs://..., tfds:NAME, pydoc, or a list
            records="",  # folder of TFRecords; empty: prepared from data.corpus in the workdir
            seed=0,  # of the records: which documents are held out, pairs, masks; `seed` is that of training
            language="en",  # of the corpus, for the sentence splitter: an ISO 639-1 code
            split_sentences=True,  # False: every line of the corpus already is one sentence
            heldout_fraction=0.005,  # of the documents; kept out of training and of the learnt vocabulary
            dupe_factor=10,  # times that each document is used, masked differently
            masked_lm_prob=0.15,
            short_seq_prob=0.1,
            do_whole_word_mask=False,
        )
    )

    config.optimizer = ml_collections.ConfigDict(
        dict(
            name="adam",  # with decoupled weight decay; lamb for batches of thousands
            learning_rate=1e-4,
            warmup_steps=10_000,
            beta1=0.9,
            beta2=0.999,
            epsilon=1e-6,
            weight_decay=0.01,
            max_grad_norm=1.0,
            bias_correction=False,  # Google's AdamWeightDecayOptimizer has none
        )
    )

    config.log_every_steps = 100
    config.eval = ml_collections.ConfigDict(
        dict(
            every_steps=10_000,
            max_sequences=8192,
            fill_masks=("the man went to the [MASK] to buy a [MASK] of milk .",),  # shown when training is done
        )
    )
    config.checkpoint = ml_collections.ConfigDict(dict(every_steps=5_000, keep=3))  # the best one is kept as well
    return config.lock()


def fine_tuning_config(task: str, **data) -> ml_collections.ConfigDict:
    """Fine-tuning as published (Devlin et al. 2019, appendix A.3), without data and checkpoint.

    The model, but for dropout, and the tokenizer are those of `init_checkpoint`. `data`: what the task wants to know
    about its data besides `data.path`.
    """
    config = default_config().unlock()
    config.task = task
    del config.stages
    config.epochs = 3.0
    config.batch_size = 32
    config.max_seq_length = 128  # what is longer is cut
    config.data = ml_collections.ConfigDict(dict(path="", **data))  # the folder of the data, or tfds:NAME
    config.optimizer.learning_rate = 2e-5
    del config.optimizer.warmup_steps
    config.optimizer.warmup_proportion = 0.1  # of the steps
    # Without it the first steps are far too long, which is why BERT-large often learnt nothing (Mosbach et al. 2021).
    config.optimizer.bias_correction = True
    config.log_every_steps = 50
    config.eval = ml_collections.ConfigDict(dict(every_steps=0))  # 0: after every epoch
    config.checkpoint = ml_collections.ConfigDict(dict(every_steps=1000, keep=1))
    config.sweep = ""  # "paper", or such as "learning_rate=5e-5,3e-5 epochs=2,3 seed=0,1,2": all of these, one by one
    config.restarts = 0  # of a sweep's run that learnt nothing, with other seeds
    return config.lock()


def bert_config(config: ml_collections.ConfigDict) -> BertConfig:
    return BertConfig(**config.model.to_dict())


def total_steps(config: ml_collections.ConfigDict) -> int:
    return sum(s.steps for s in config.stages)


def corpus_sources(config: ml_collections.ConfigDict) -> tuple[str, ...]:
    """`data.corpus` as a tuple: it may be one string, several in one with commas (a flag), or a list."""
    corpus = config.data.corpus or ()
    parts = corpus.split(",") if isinstance(corpus, str) else corpus
    if not isinstance(parts, Sequence) or not all(isinstance(p, str) for p in parts):
        raise UserError(f"config.data.corpus = {corpus!r}: must be a string, or a list of strings")
    return tuple(p.strip() for p in parts if p.strip())


def validate_pretraining(config: ml_collections.ConfigDict, with_data: bool = True) -> None:
    """`validate`, for what only pre-training has: records, a vocabulary to be learnt, stages."""
    _require(config.task == "pretraining", "task", config.task, "this command is for pre-training")
    validate(config, with_data)


def _require(ok: bool, field: str, value, remedy: str) -> None:
    if not ok:
        raise UserError(f"config.{field} = {value!r}: {remedy}")


def _positive(config, section: str, names: str) -> None:
    fields = config[section] if section else config
    for name in names.split():
        field = f"{section}.{name}" if section else name
        _require(fields[name] >= 1, field, fields[name], "must be at least 1")


def _share(config, section: str, names: str) -> None:
    for name in names.split():
        value = config[section][name]
        _require(0 <= value < 1, f"{section}.{name}", value, "must be at least 0 and below 1")


def _seed(field: str, value: int) -> None:
    _require(0 <= value < 2**31, field, value, "must be at least 0 and below 2 ** 31")


def validate(config: ml_collections.ConfigDict, with_data: bool = True) -> None:
    """Checks what can be known without touching a file or a device. Raises `UserError`: field, value, remedy.

    `with_data`: the config also has to say where the text or the records are.
    """

    require = _require

    def one_of(field: str, value, choices):
        require(value in choices, field, value, f"choose one of {', '.join(choices)}")

    one_of("task", config.task, ("pretraining", *FINE_TUNING_TASKS))
    one_of("tokenizer.kind", config.tokenizer.kind, TOKENIZER_KINDS)
    one_of("model.hidden_act", config.model.hidden_act, ACTIVATIONS)
    one_of("optimizer.name", config.optimizer.name, OPTIMIZERS)
    one_of("remat", config.remat, REMAT_POLICIES)
    one_of("dtype", config.dtype, DTYPES)
    one_of("grad_dtype", config.grad_dtype, DTYPES[1:])

    _positive(config, "", "batch_size microbatches log_every_steps hosts_timeout")
    _seed("seed", config.seed)
    _positive(config, "checkpoint", "every_steps keep")
    _positive(
        config,
        "model",
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size"
        " max_position_embeddings type_vocab_size",
    )
    _share(config, "model", "hidden_dropout_prob attention_probs_dropout_prob")
    _share(config, "optimizer", "beta1 beta2 weight_decay")
    for name in ("learning_rate", "epsilon", "max_grad_norm"):
        require(config.optimizer[name] > 0, f"optimizer.{name}", config.optimizer[name], "must be above 0")

    model, batch, pieces = config.model, config.batch_size, config.microbatches
    require(
        model.hidden_size % model.num_attention_heads == 0,
        "model.hidden_size",
        model.hidden_size,
        f"must be a multiple of model.num_attention_heads = {model.num_attention_heads}",
    )
    require(batch % pieces == 0, "batch_size", batch, f"must be a multiple of microbatches = {pieces}")

    sizes = list(config.mesh.values())
    for axis, size in config.mesh.items():
        require(size == -1 or size >= 1, f"mesh.{axis}", size, "must be at least 1, or -1 for the devices left")
    require(sizes.count(-1) <= 1, "mesh", dict(config.mesh), "only one axis can be -1")
    check = _validate_pretraining if config.task == "pretraining" else _validate_fine_tuning
    check(config, with_data)


def _validate_pretraining(config, with_data: bool) -> None:
    require, model = _require, config.model
    require(config.optimizer.warmup_steps >= 0, "optimizer.warmup_steps", config.optimizer.warmup_steps, "at least 0")
    _positive(config, "eval", "every_steps max_sequences")
    _seed("data.seed", config.data.seed)
    _positive(config, "data", "dupe_factor")
    _share(config, "data", "short_seq_prob heldout_fraction")
    require(0 < config.data.masked_lm_prob <= 0.5, "data.masked_lm_prob", config.data.masked_lm_prob, "0 < p <= 0.5")
    is_stages = len(config.stages) > 0 and all(isinstance(s, ml_collections.ConfigDict) for s in config.stages)
    require(is_stages, "stages", config.stages, "must be one stage or more: (stage(steps, length, predictions),)")
    lengths = [s.length for s in config.stages]
    require(len(set(lengths)) == len(lengths), "stages", lengths, "each stage needs a length of its own")
    for i, s in enumerate(config.stages):
        field = f"stages[{i}]"
        require(s.steps >= 1, f"{field}.steps", s.steps, "must be at least 1")
        require(s.length >= 8, f"{field}.length", s.length, "must be at least 8")
        require(
            s.length <= model.max_position_embeddings,
            f"{field}.length",
            s.length,
            f"longer than the position table, model.max_position_embeddings = {model.max_position_embeddings}",
        )
        # 0.1 below 15 %: the paper's own 20 of 128 is 15.6 %, a round-off either way is no mistake.
        needed = int(config.data.masked_lm_prob * s.length)
        require(
            s.max_predictions_per_seq >= needed,
            f"{field}.max_predictions_per_seq",
            s.max_predictions_per_seq,
            f"too small for data.masked_lm_prob = {config.data.masked_lm_prob} of {s.length} tokens:"
            f" use at least {needed}",
        )
        require(
            s.max_predictions_per_seq <= s.length,
            f"{field}.max_predictions_per_seq",
            s.max_predictions_per_seq,
            f"more than the sequence's {s.length} tokens",
        )

    for text in config.eval.fill_masks:
        require("[MASK]" in text, "eval.fill_masks", text, "each text needs a [MASK]")

    require(
        not with_data or bool(config.data.records) or bool(corpus_sources(config)),
        "data.corpus",
        config.data.corpus,
        "say where the text is (files, a folder, a glob, gs://..., tfds:NAME, pydoc), or set data.records",
    )


def _validate_fine_tuning(config, with_data: bool) -> None:
    require, longest = _require, config.max_seq_length
    _share(config, "optimizer", "warmup_proportion")
    require(config.epochs > 0, "epochs", config.epochs, "must be above 0")
    require(longest >= 8, "max_seq_length", longest, "must be at least 8")
    require(config.restarts >= 0, "restarts", config.restarts, "must be at least 0")
    one = f'is for a search; for one run give --config.sweep="seed={config.seed}" too'
    require(bool(config.sweep) or not config.restarts, "restarts", config.restarts, one)
    require(config.eval.every_steps >= 0, "eval.every_steps", config.eval.every_steps, "must be at least 0")
    if config.task == "glue":
        require(config.data.name in GLUE_TASKS, "data.name", config.data.name, f"choose one of {', '.join(GLUE_TASKS)}")
    if config.task == "squad":
        version, query, stride = config.data.version, config.data.max_query_length, config.data.doc_stride
        require(version in SQUAD_VERSIONS, "data.version", version, f"choose one of {', '.join(SQUAD_VERSIONS)}")
        require(1 <= query <= longest - 8, "data.max_query_length", query, f"1 to max_seq_length - 8 = {longest - 8}")
        require(stride >= 1, "data.doc_stride", stride, "must be at least 1")
    if config.task == "features":
        head, layers = config.head, config.model.num_hidden_layers
        require(head.layers in FEATURE_LAYERS, "head.layers", head.layers, f"choose one of {', '.join(FEATURE_LAYERS)}")
        enough = layers >= (4 if head.layers.endswith("last_four") else 1)
        require(enough, "head.layers", head.layers, f"the model has {layers} layers only")
        _positive(config, "head", "lstm_size lstm_layers")
    if not with_data:
        return
    own = config.task in ("classify", "tag")
    where = "a folder" if own else "a folder, or tfds:NAME"
    require(bool(config.data.path), "data.path", config.data.path, f"say where the data is: {where}")
    require(
        bool(config.init_checkpoint),
        "init_checkpoint",
        config.init_checkpoint,
        "say what to fine-tune: the workdir of a run, a Hugging Face folder, or Google's bert_model.ckpt",
    )

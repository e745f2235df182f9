"""Default configs of pre-training and fine-tuning.

A config is a locked `ml_collections.ConfigDict`, so that a misspelt field is an error. An experiment starts from
`pretraining_config()` or `fine_tuning_config()` and sets only what differs. `launch.validate` checks it before any
file or device is touched.
"""

import dataclasses

import ml_collections
from ml_collections import config_dict

from bertjax.config.model_config import BertConfig

RECIPES = ("modern", "bert")  # of `config.recipe`


def stage(steps: int, length: int, max_predictions_per_seq: int, **changes) -> ml_collections.ConfigDict:
    """Returns one stage of pre-training: `steps` updates on sequences of `length` tokens.

    Args:
      changes: `tokens=1e9` instead of steps, which are 0 then. Fields that differ in this stage, such as
        `batch_size=64` and `data=dict(masked_lm_prob=0.15)`; `pretraining.stage_fields.changeable_fields` lists these
        fields. A batch that grows to its size: `ramp_from=64, ramp_tokens=1e9` begins with 64 sequences, and has 128,
        192, ... in as many steps each.
    """
    for name in ("tokens", "ramp_tokens"):
        if isinstance(changes.get(name), int):
            changes[name] = float(changes[name])  # may exceed int32
    fields = dict(steps=steps, length=length, max_predictions_per_seq=max_predictions_per_seq, **changes)
    return ml_collections.ConfigDict(fields)


def named_stages(**stages: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns `config.stages`: the stages by name, for flags such as `--config.stages.short.steps=1000`."""
    return ml_collections.ConfigDict(stages)


def param_groups(**groups: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns `config.optimizer.groups`: the groups by name. A param is in one of them at most."""
    return ml_collections.ConfigDict(groups)


def param_group(
    params: str, learning_rate_factor: float = 1.0, weight_decay: float | None = None
) -> ml_collections.ConfigDict:
    """Returns a group of params.

    Args:
      params: regular expression that is found in their names, such as "bert/encoder/layers/output/kernel".
      learning_rate_factor: multiplies the learning rate; 0 trains none of them, nor does weight decay change them.
      weight_decay: instead of `optimizer.weight_decay` for kernels and embeddings, and none for others.
    """
    decay = config_dict.placeholder(float)
    group = ml_collections.ConfigDict(
        dict(params=params, learning_rate_factor=float(learning_rate_factor), weight_decay=decay)
    )
    group.weight_decay = weight_decay
    return group


def common_config() -> ml_collections.ConfigDict:
    """Returns the fields that pre-training and fine-tuning share, unlocked."""
    config = ml_collections.ConfigDict()
    config.task = ""
    # How long a run takes from start to report (20min, 8h, 2d), or on how many tokens it trains (200M): sets the number
    # of its steps. Empty: the steps or epochs of this config.
    config.budget = ""
    config.overrides = ()  # names of the fields that the user has set; the command line adds those of its flags
    config.seed = 0  # for initial weights, order of examples, dropout
    config.batch_size = 256  # sequences per step, over all devices and hosts
    config.packing = False  # sequences share rows, of which a step then has fewer, and hardly any padding
    config.microbatches = 1  # splits the batch into this many parts and sums their gradients, to save memory
    config.model = ml_collections.ConfigDict(dataclasses.asdict(BertConfig()))
    config.init_checkpoint = ""  # initialize from this checkpoint instead of randomly
    config.freeze_layers = 0  # the embeddings and so many of the first layers are not trained; 0: all are
    # Type of activations; on a CPU they are float32, and matrix products take this type. auto is bfloat16, but float32
    # on CPUs that do not multiply bfloat16 faster (`mesh.compute_for` has the table). Params are always float32.
    config.dtype = "auto"
    config.grad_dtype = "float32"  # type in which gradients are summed across devices; bfloat16 halves the traffic
    # What the backward pass recomputes to save memory: none | dots (all but matrix products) | full (whole layers);
    # in pre-training also auto (as little as fits).
    config.remat = "none"
    # Compiles each layer by itself, not one for all, unless it is recomputed. A step is faster, compiling takes longer:
    # yes | no | auto (yes on CPUs, and in long pre-training where there are kernels).
    config.unroll = "auto"
    config.kernels = "auto"  # our kernels for TPUs and GPUs; no: the compiler's operations alone
    config.mesh = ml_collections.ConfigDict(dict(data=-1, fsdp=1, tensor=1))  # -1: the remaining devices
    config.hosts_timeout = 300  # seconds to wait for all hosts of a run to start

    # Text -> ids: wordpiece | sentencepiece | bytes (of UTF-8; 261 pieces, without a file) | bpe (of bytes, for GPT-2
    # and ModernBERT) | unigram (for XLM-R; not learnt here). With an empty path, pre-training learns model.vocab_size
    # pieces from data.corpus, or uses the vocabulary of data.records; fine-tuning uses that of init_checkpoint.
    config.tokenizer = ml_collections.ConfigDict(dict(kind="wordpiece", path="", lowercase=True))

    config.optimizer = ml_collections.ConfigDict(
        dict(
            # adam (with decoupled weight decay) | lamb, for batches of thousands | stable_adamw | muon | one of optax:
            # lion, sm3, ...
            name="adam",
            options="",  # arguments of muon and optax's optimizers: "b1=0.95 nesterov=True"
            # The learning rate after the warm-up: linear (to 0, counted from step 0) | constant | cosine (to 0) |
            # trapezoid (constant, then falling over the last decay_proportion of the steps).
            schedule="linear",
            decay_proportion=0.1,
            decay="linear",  # how a trapezoid falls: linear | sqrt (1 - sqrt of the share of the steps) | cosine
            decay_to=0.0,  # where it ends, as a share of the peak
            groups=ml_collections.ConfigDict(),  # param groups with their own learning rate or decay: `param_groups`
            layer_decay=1.0,  # learning rate of a layer / learning rate of the layer above it
            learning_rate=1e-4,
            beta1=0.9,  # beta1, beta2, epsilon and bias_correction are for adam and lamb only
            beta2=0.999,
            epsilon=1e-6,
            weight_decay=0.01,
            max_grad_norm=1.0,
            bias_correction=False,  # Google's AdamWeightDecayOptimizer has none
            average=0.0,  # above 0: such as 0.999, decay of a moving average of the params, which is evaluated and used
            skip_nonfinite=0,  # updates in a row that are left out because the loss is not finite, before a run stops
        )
    )
    config.log_every_steps = 100
    config.sinks = ("tensorboard",)  # where metrics go, besides WORKDIR/metrics.jsonl: also mlflow and wandb
    config.hooks = ()  # names of hooks that a user has registered (`bertjax.training.hooks`)
    config.watchdog = 10.0  # logs the cause of a step slower than watchdog x the median step; 0: no logs
    config.profile = ""  # START:STOP writes a trace of these steps, both included, to WORKDIR/profile
    # patience: a run ends after so many evaluations in a row without a better score than before; 0: it does not.
    config.eval = ml_collections.ConfigDict(dict(every_steps=10_000, patience=0))
    # Keeps the latest 3 and the best; with keep_every=N also those of steps N, 2 N, 3 N, ...
    config.checkpoint = ml_collections.ConfigDict(dict(every_steps=5_000, keep=3, keep_every=0))
    return config


def pretraining_config() -> ml_collections.ConfigDict:
    """BERT-base pre-training as published (Devlin et al. 2019, appendix A.2), without a corpus."""
    config = common_config()
    config.task = "pretraining"
    # modern or bert: the model, the vocabulary and the stages are chosen from the text, the machine and the budget,
    # except for `overrides` (see `bertjax.launch.budget`). Empty: the model, the vocabulary and the stages of this
    # config.
    config.recipe = ""
    # What is learnt: one of mlm (masked words), lm (next words), bilm (both neighbours), plm (words in any order), nsp
    # (next sentence) and sop (sentence order), or a sum such as "mlm + 0.5*sop" or "50*replaced + generator" (ELECTRA).
    # Empty: the words that the model's family learns, and what the pairs of data.next_sentence teach.
    config.objective = ""
    config.z_loss = 0.0  # in training, adds so many times the mean of log(Z)^2 of the softmax over words, such as 1e-4
    config.tokenizer.extend = 0  # new pieces that are learnt from data.corpus, after those of tokenizer.path
    # How init_checkpoint is adapted.
    config.adapt = ml_collections.ConfigDict(
        dict(
            model=False,  # its own model is trained, whatever config.model says but for dropout
            positions=0,  # it has in the end; 0: as many as before
            positions_from="repeat",  # what positions beyond its table start from: repeat | interpolate (the table)
            new_pieces_first=0,  # steps in which only the embeddings of new pieces are trained
        )
    )
    # WORKDIR@STEP of a run that this one goes on from, in a workdir of its own: its whole state and its records, with
    # the stages and schedule of this config.
    config.branch_from = ""
    # 90 % of the steps at length 128, the rest at 512. 77 = ceil(0.15 * 512), so that no prediction is dropped.
    config.stages = named_stages(short=stage(900_000, 128, 20), long=stage(100_000, 512, 77))

    # Ids -> records. Field names as in Google's create_pretraining_data.py, if it has them.
    config.data = ml_collections.ConfigDict(
        dict(
            # A file, folder, glob, gs://..., hf:NAME, tfds:NAME, pydoc, or a list of them: A,B (a comma in a name: \,).
            corpus=config_dict.placeholder(object),
            # How often sources are used: SOURCE=WEIGHT,... multiplies dupe_factor; others: 1. SOURCE=20%: its
            # share of the sequences, if they are mixed when they are read.
            mixture="",
            # When the mixture is made: prepared (in the records, whose sequences are all shuffled) | read (records keep
            # the sources apart, so that stages can mix them differently).
            mix_when="prepared",
            records="",  # folder of TFRecords; empty: prepare them from data.corpus in the workdir
            layout="google",  # format of the records: google (theirs) | compact (without padding: half the size)
            checksums=False,  # reads all records before training and compares them with the manifest's checksums
            on_corrupt="stop",  # at a damaged record: stop | skip (an empty row takes its place; counted)
            seed=0,  # for the records: held-out documents, pairs, masks; config.seed is for training
            document="blank_line",  # what a document of .txt files is; it ends at a blank_line | file | line
            on_bad_document="stop",  # at a document that is not text, or has a huge sentence: stop | skip (counted)
            text_column="text",  # text field of .parquet and .jsonl files, Hugging Face data sets, TensorFlow Datasets
            language="en",  # language of the corpus, for the sentence splitter: an ISO 639-1 code
            split_sentences=True,  # False: each line of the corpus is one sentence
            heldout_fraction=0.005,  # share of the documents; excluded from training and from the learnt vocabulary
            dupe_factor=10,  # copies of each document, masked differently
            # What the second segment is: pairs (of half of them the actual next text, else a random one) | order (the
            # next one, half of them swapped; ALBERT) | none (one segment of full sentences; RoBERTa).
            next_sentence="pairs",
            masking="static",  # static (in the records) | dynamic (when they are read, differently in each epoch)
            masked_lm_prob=0.15,
            masked_lm_split=(0.8, 0.1, 0.1),  # shares of the chosen tokens: [MASK], a random piece, left as it is
            short_seq_prob=0.1,
            # Sequences are cut from a stream of text, in its order, and a row of a batch goes on where it ended in the
            # step before, with the model's memory (Transformer-XL); each epoch reads the stream again.
            stream=False,
            do_whole_word_mask=False,
            do_span_mask=False,  # spans of whole words, of geometric lengths (SpanBERT)
        )
    )
    # What is left out of the corpus, counted in the manifest.
    config.data.cleaning = ml_collections.ConfigDict(
        dict(
            nfc=False,  # Unicode NFC
            min_words=0,  # a document has
            max_symbols=1.0,  # share of characters that are neither letters, marks, digits nor spaces, in a document
            duplicate_documents=False,  # all but the first of documents with the same text
            near_duplicates=False,  # documents that resemble an earlier one (MinHash, see data/corpus/cleaning.py)
            max_line_documents=0,  # a line that more documents than this have is left out of all of them; 0: none is
        )
    )
    config.optimizer.warmup_steps = 10_000
    config.optimizer.warmup_tokens = 0.0  # above 0: instead of warmup_steps; schedules count tokens then, not steps
    config.eval.max_sequences = 8192
    # Windows of the held-out text of each source whose bits per byte are measured; of init_checkpoint as well, if there
    # is one; 0: none.
    config.eval.bits_windows = 0
    # With data.stream: the tokens of memory for held-out text, and the largest distance between two tokens, to which
    # larger distances are clamped; 0: as in training. Dai et al. 2019 evaluate with longer memories than they train.
    config.eval.memory_length = 0
    config.eval.clamp_length = 0
    config.eval.fill_masks = ("the man went to the [MASK] to buy a [MASK] of milk .",)  # printed after training
    return config.lock()


def fine_tuning_config(task: str, **data) -> ml_collections.ConfigDict:
    """Fine-tuning as published (Devlin et al. 2019, appendix A.3), without data and checkpoint.

    The model (except dropout) and the tokenizer come from `init_checkpoint`. `data` are the task's own fields of
    `config.data`, besides `data.path`.
    """
    config = common_config()
    config.task = task
    config.batch_size = 32
    config.epochs = 3.0
    config.max_seq_length = 128  # longer inputs are truncated
    config.keep_layers = 0  # the model has so many of init_checkpoint's layers, every n-th; 0: all
    config.data = ml_collections.ConfigDict(dict(path="", **data))  # a folder, or tfds:NAME
    if task in ("ner", "tag", "features") and "join" not in config.data:
        # How the words of a table are read, where pieces contain the space before a word: text (as in running text:
        # no space before a comma, see `text.words.join_words`) | spaces (each word has a space before it).
        config.data.join = "text"
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_proportion = 0.1  # share of the steps
    # Without it, the first updates are far too large, and BERT-large often fails to train (Mosbach et al. 2021).
    config.optimizer.bias_correction = True
    config.log_every_steps = 50
    config.eval.every_steps = 0  # 0: after every epoch
    config.checkpoint.update(every_steps=1000, keep=1)
    config.sweep = ""  # grid search: "paper", or such as "learning_rate=5e-5,3e-5 epochs=2,3 seed=0,1,2"
    # Low-rank updates (LoRA) of kernels of the encoder, which is not trained itself; rank 0: none. Targets are query,
    # key, value and others by their names, all of attention, or all-linear.
    config.lora = ml_collections.ConfigDict(dict(rank=0, alpha=16.0, dropout=0.0, targets="query,value"))
    config.restarts = 0  # how often a sweep repeats a failed trial, with other seeds
    # A teacher: a checkpoint with the same labels, whose logits are learnt too; labels have the rest of the weight.
    config.distill = ml_collections.ConfigDict(dict(teacher="", temperature=2.0, weight=0.5))
    config.head = ml_collections.ConfigDict(
        dict(
            # A BiLSTM between BERT and the output layer: its size in each direction (0: none), and its layers.
            lstm_size=0,
            lstm_layers=1,
            # What an example of a class, or a label of several, counts in the loss: LABEL=WEIGHT,... (1 for others), or
            # balanced: the more, the rarer. Empty: all the same.
            class_weights="",
            label_smoothing=0.0,  # share of each label that is spread over all classes
        )
    )
    return config.lock()

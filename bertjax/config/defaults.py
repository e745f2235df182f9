"""Default configs of pre-training and fine-tuning.

A config is a locked `ml_collections.ConfigDict`, so that a misspelt field is an error. An experiment starts from
`pretraining_config()` or `fine_tuning_config()` and sets the fields that differ. `launch.validate` checks the config
before the run reads a file or uses a device.
"""

import dataclasses
from typing import Any

import ml_collections
from ml_collections import config_dict

from bertjax.config.model_config import BertConfig

RECIPES = ("modern", "bert")  # values of `config.recipe`


def stage(steps: int, length: int, max_predictions_per_seq: int, **changes: Any) -> ml_collections.ConfigDict:
    """Returns one stage of pre-training: `steps` updates on sequences of `length` tokens.

    Args:
      steps: the number of updates; 0 with `tokens`.
      length: the sequence length.
      max_predictions_per_seq: the largest number of predicted tokens in a sequence.
      **changes: `tokens=1e9` instead of steps. Fields that differ in this stage, such as `batch_size=64` and
        `data=dict(masked_lm_prob=0.15)`; `pretraining.stage_fields.changeable_fields` lists these fields. A growing
        batch: `ramp_from=64, ramp_tokens=1e9` begins with 64 sequences and continues with 128, 192, ... sequences, with
        equally many steps for each size.
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
    """Returns `config.optimizer.groups`: the groups by name. A param is in at most one group."""
    return ml_collections.ConfigDict(groups)


def param_group(
    params: str, learning_rate_factor: float = 1.0, weight_decay: float | None = None
) -> ml_collections.ConfigDict:
    """Returns a group of params.

    Args:
      params: a regular expression that matches a part of the names, such as "bert/encoder/layers/output/kernel".
      learning_rate_factor: multiplies the learning rate. 0: neither gradients nor weight decay change the params.
      weight_decay: the weight decay of all params of the group; None: `optimizer.weight_decay` for kernels and
        embeddings, and no decay for other params.
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
    # The time from the start to the report (20min, 8h, 2d), or the number of training tokens (200M), from which the
    # number of steps is computed. Empty: the steps or epochs of this config.
    config.budget = ""
    config.overrides = ()  # names of the fields that the user has set; the command line adds the fields of its flags
    config.seed = 0  # for initial weights, order of examples, dropout
    config.batch_size = 256  # sequences per step, over all devices and hosts
    config.packing = False  # sequences share rows: a step has fewer rows and hardly any padding
    config.microbatches = 1  # the batch is split into this number of parts, whose gradients are summed, to save memory
    config.model = ml_collections.ConfigDict(dataclasses.asdict(BertConfig()))
    config.init_checkpoint = ""  # initialize from this checkpoint instead of randomly
    config.freeze_layers = (
        0  # number of first layers that are frozen, together with the embeddings; 0: no frozen params
    )
    # The dtype of activations. On a CPU activations are float32, and this is the dtype of matrix products. auto:
    # bfloat16, or float32 on CPUs that do not multiply bfloat16 faster (see the table of `mesh.compute_for`). Params
    # are always float32.
    config.dtype = "auto"
    config.grad_dtype = "float32"  # dtype in which gradients are summed across devices; bfloat16 halves the traffic
    # The values that the backward pass recomputes to save memory: none | dots (all but matrix products) | full (whole
    # layers); in pre-training also auto (the fewest values with which the step fits).
    config.remat = "none"
    # Whether to compile every layer instead of one layer for all. A step is faster, and the compilation takes longer:
    # yes | no | auto (yes on CPUs, and in long pre-training on devices with kernels). Not with remat.
    config.unroll = "auto"
    config.kernels = "auto"  # the kernels of bertjax for TPUs and GPUs; no: only the operations of the compiler
    config.mesh = ml_collections.ConfigDict(dict(data=-1, fsdp=1, tensor=1))  # -1: the remaining devices
    config.hosts_timeout = 300  # seconds to wait for all hosts of a run to start

    # Text -> ids: wordpiece | sentencepiece | bytes (of UTF-8; 261 tokens, without a file) | bpe (of bytes, for GPT-2
    # and ModernBERT) | unigram (for XLM-R) | byte_fallback (BPE of characters, for mmBERT). The last two cannot be
    # learned here. With an empty path, pre-training learns model.vocab_size tokens from data.corpus, or uses the
    # vocabulary of data.records; fine-tuning uses the vocabulary of init_checkpoint.
    config.tokenizer = ml_collections.ConfigDict(dict(kind="wordpiece", path="", lowercase=True))

    config.optimizer = ml_collections.ConfigDict(
        dict(
            # adam (with decoupled weight decay) | lamb (for batches of thousands) | stable_adamw | muon | an optimizer
            # of optax: lion, sm3, ...
            name="adam",
            options="",  # arguments of muon and of the optimizers of optax: "b1=0.95 nesterov=True"
            # The learning rate after the warm-up: linear (to 0, counted from step 0) | constant | cosine (to 0) |
            # trapezoid (constant, then a decay in the last decay_proportion of the steps).
            schedule="linear",
            decay_proportion=0.1,
            decay="linear",  # the decay of a trapezoid: linear | sqrt (1 - sqrt of the share of the steps) | cosine
            decay_to=0.0,  # the end of the decay, as a share of the peak
            groups=ml_collections.ConfigDict(),  # groups of params with another learning rate or decay: `param_groups`
            layer_decay=1.0,  # learning rate of a layer / learning rate of the next layer
            learning_rate=1e-4,
            beta1=0.9,  # beta1, beta2, epsilon and bias_correction are for adam and lamb
            beta2=0.999,
            epsilon=1e-6,
            weight_decay=0.01,
            max_grad_norm=1.0,
            bias_correction=False,  # as in Google's AdamWeightDecayOptimizer
            average=0.0,  # decay of a moving average of the params, which is evaluated and used, such as 0.999; 0: off
            skip_nonfinite=0,  # number of consecutive updates with a loss that is not finite, before a run stops
        )
    )
    config.log_every_steps = 100
    config.sinks = ("tensorboard",)  # trackers in addition to WORKDIR/metrics.jsonl; also mlflow and wandb
    config.hooks = ()  # names of hooks that a user has registered (`bertjax.training.hooks`)
    config.watchdog = 10.0  # logs the cause of a step slower than watchdog x the median step; 0: no logs
    config.profile = ""  # START:STOP writes a trace of the steps from START to STOP to WORKDIR/profile
    # patience: a run ends after this number of consecutive evaluations without a better score; 0: no early stopping.
    config.eval = ml_collections.ConfigDict(dict(every_steps=10_000, patience=0))
    # Keeps the latest 3 checkpoints and the best; with keep_every=N also the checkpoints of steps N, 2 N, 3 N, ...
    config.checkpoint = ml_collections.ConfigDict(dict(every_steps=5_000, keep=3, keep_every=0))
    return config


def pretraining_config() -> ml_collections.ConfigDict:
    """Returns the published config of BERT-base pre-training (Devlin et al. 2019, appendix A.2), without a corpus."""
    config = common_config()
    config.task = "pretraining"
    # modern or bert: the model, the vocabulary and the stages are chosen from the text, the machine and the budget,
    # except for `overrides` (see `bertjax.launch.budget`). Empty: the model, the vocabulary and the stages of this
    # config.
    config.recipe = ""
    # The objective: mlm (masked words), lm (next words), bilm (both neighbours), plm (words in any order), nsp (next
    # sentence), sop (sentence order), or a sum such as "mlm + 0.5*sop" or "50*replaced + generator" (ELECTRA). Empty:
    # the objective for words of the model family, and the objective for pairs that belongs to data.next_sentence.
    config.objective = ""
    config.z_loss = 0.0  # weight of the mean of log(Z)^2 of the softmax over words in the training loss, such as 1e-4
    config.tokenizer.extend = 0  # number of new tokens, learned from data.corpus and added to tokenizer.path
    # The adaptation of init_checkpoint.
    config.adapt = ml_collections.ConfigDict(
        dict(
            model=False,  # trains the model of the checkpoint, and reads only the dropout rates of config.model
            positions=0,  # number of position embeddings after adaptation; 0: the number of the checkpoint
            positions_from="repeat",  # initial values of new positions: repeat | interpolate (the table)
            new_pieces_first=0,  # number of first steps that train only the embeddings of new tokens
        )
    )
    # WORKDIR@STEP: resumes this run in another workdir, with its whole state and its records, and with the stages and
    # the schedule of this config.
    config.branch_from = ""
    # 90 % of the steps at length 128, the rest at 512. 77 = ceil(0.15 * 512), so that no prediction is dropped.
    config.stages = named_stages(short=stage(900_000, 128, 20), long=stage(100_000, 512, 77))
    _set_pretraining_data(config)
    config.optimizer.warmup_steps = 10_000
    config.optimizer.warmup_tokens = 0.0  # above 0: replaces warmup_steps, and schedules count tokens instead of steps
    config.eval.max_sequences = 8192
    # Number of windows of the held-out text of each source whose bits per byte are measured, also for init_checkpoint;
    # 0: no measurement.
    config.eval.bits_windows = 0
    # With data.stream: the tokens of memory for held-out text, and the largest distance between two tokens, to which
    # larger distances are clamped; 0: as in training. Dai et al. 2019 evaluate with longer memories than they train.
    config.eval.memory_length = 0
    config.eval.clamp_length = 0
    config.eval.fill_masks = ("the man went to the [MASK] to buy a [MASK] of milk .",)  # printed after training
    return config.lock()


def _set_pretraining_data(config: ml_collections.ConfigDict) -> None:
    """Sets `config.data`. Fields of Google's create_pretraining_data.py have the same names."""
    config.data = ml_collections.ConfigDict(
        dict(
            # A file, folder, glob, gs://..., hf:NAME, tfds:NAME, pydoc, or a list of sources: A,B (a comma in a name
            # is written as \,).
            corpus=config_dict.placeholder(object),
            # Weights of sources. SOURCE=WEIGHT,... multiplies dupe_factor; the default is 1. SOURCE=20% is a share of
            # the sequences, for mix_when=read.
            mixture="",
            # When sources are mixed: prepared (all sequences of the records are shuffled) | read (records keep the
            # sources apart, so that every stage can have another mixture).
            mix_when="prepared",
            records="",  # folder of TFRecords; empty: prepared from data.corpus in the workdir
            layout="google",  # format of the records: google | compact (without padding: half the size)
            checksums=False,  # reads all records before training and compares them with the checksums of the manifest
            on_corrupt="stop",  # at a damaged record: stop | skip (an empty row replaces the record; counted)
            seed=0,  # for the records: held-out documents, pairs, masks; config.seed is for training
            document="blank_line",  # the end of a document in .txt files: blank_line | file | line
            on_bad_document="stop",  # at a document that is not text, or has a huge sentence: stop | skip (counted)
            text_column="text",  # text field of .parquet and .jsonl files, Hugging Face data sets, TensorFlow Datasets
            language="en",  # language of the corpus, for the sentence splitter: an ISO 639-1 code
            split_sentences=True,  # False: each line of the corpus is one sentence
            heldout_fraction=0.005,  # share of the documents; excluded from training and from the learned vocabulary
            dupe_factor=10,  # copies of each document, masked differently
            # The second segment: pairs (the next text, or a random text in half of the pairs) | order (the next text,
            # swapped with the first in half of the pairs; ALBERT) | none (one segment of full sentences; RoBERTa).
            next_sentence="pairs",
            masking="static",  # static (in the records) | dynamic (when records are read, differently in each epoch)
            masked_lm_prob=0.15,
            masked_lm_split=(0.8, 0.1, 0.1),  # shares of the chosen tokens: [MASK], a random token, unchanged
            short_seq_prob=0.1,
            # Sequences are cut from a stream of text in order. A row of a batch continues the row of the step before,
            # with the recurrent memory of the model (Transformer-XL). Each epoch reads the stream again.
            stream=False,
            do_whole_word_mask=False,
            do_span_mask=False,  # spans of whole words, with geometric lengths (SpanBERT)
        )
    )
    # Texts that are removed from the corpus, counted in the manifest.
    config.data.cleaning = ml_collections.ConfigDict(
        dict(
            nfc=False,  # normalizes to Unicode NFC
            min_words=0,  # minimum number of words per document
            max_symbols=1.0,  # share of characters in a document that are neither letters, marks, digits nor spaces
            duplicate_documents=False,  # removes documents with the text of an earlier document
            near_duplicates=False,  # removes documents that resemble an earlier one (MinHash, data/corpus/cleaning.py)
            max_line_documents=0,  # removes lines that are in more documents than this from all documents; 0: off
        )
    )


def fine_tuning_config(task: str, **data: Any) -> ml_collections.ConfigDict:
    """Returns the published config of fine-tuning (Devlin et al. 2019, appendix A.3), without data and checkpoint.

    The model (except dropout) and the tokenizer come from `init_checkpoint`.

    Args:
      task: the name of the task.
      **data: the fields of `config.data` that the task adds to `data.path`.
    """
    config = common_config()
    config.task = task
    config.batch_size = 32
    config.epochs = 3.0
    config.max_seq_length = 128  # longer inputs are truncated
    config.keep_layers = 0  # number of layers of init_checkpoint that the model keeps, every n-th; 0: all
    config.data = ml_collections.ConfigDict(dict(path="", **data))  # a folder, or tfds:NAME
    if task in ("ner", "tag", "features") and "join" not in config.data:
        # The spaces between the words of a table, for tokenizers whose tokens contain spaces: text (as in running text,
        # without a space before a comma, see `text.words.join_words`) | spaces (a space before each word).
        config.data.join = "text"
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_proportion = 0.1  # share of the steps
    # Otherwise the first updates are far too large, and BERT-large often fails to train (Mosbach et al. 2021).
    config.optimizer.bias_correction = True
    config.log_every_steps = 50
    config.eval.every_steps = 0  # 0: after every epoch
    config.checkpoint.update(every_steps=1000, keep=1)
    config.sweep = (
        ""  # a sweep over hyperparameters: "paper", or such as "learning_rate=5e-5,3e-5 epochs=2,3 seed=0,1,2"
    )
    # Low-rank updates (LoRA) of kernels of the frozen encoder; rank 0: no updates. Targets are the names of kernels
    # (query, key, value, ...), attention, or all-linear.
    config.lora = ml_collections.ConfigDict(dict(rank=0, alpha=16.0, dropout=0.0, targets="query,value"))
    config.restarts = 0  # number of times that a sweep repeats a failed trial, with other seeds
    # The teacher is a checkpoint with the same labels. The loss of its logits has this weight, and the loss of the
    # labels has the rest.
    config.distill = ml_collections.ConfigDict(dict(teacher="", temperature=2.0, weight=0.5))
    config.head = ml_collections.ConfigDict(
        dict(
            # A BiLSTM between the encoder and the classifier: the size of a direction (0: no LSTM), and the layers.
            lstm_size=0,
            lstm_layers=1,
            # Weights of the labels in the loss: LABEL=WEIGHT,... (the default is 1), or balanced (inversely
            # proportional to the frequency). Empty: equal weights.
            class_weights="",
            label_smoothing=0.0,  # share of each label that is distributed over all classes
        )
    )
    return config.lock()

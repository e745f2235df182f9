"""Streams of text whose rows continue in the next step with a recurrent memory: order, state, resuming, use."""

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.data.batch import RECORD_ARRAYS, STREAM_ARRAYS, RowSize
from bertjax.data.loading import pipeline
from bertjax.data.loading.order import Order
from bertjax.data.loading.transforms import SeededTransform
from bertjax.data.preprocessing.preparation import prepare
from bertjax.data.records.record_sets import find_records
from bertjax.distributed.mesh import make_mesh, put_batch
from bertjax.inference import fill_mask, generation, tasks
from bertjax.interop import pretrained
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.models.families import config_of
from bertjax.models.heads import BertForMaskedLM
from bertjax.models.xlnet.model import XlnetModel
from bertjax.nn.ops.recurrent_memory import new_memory
from bertjax.objectives.lm import StreamNextTokens
from bertjax.objectives.parsing import learn
from bertjax.pretraining import run as pretraining_run
from bertjax.pretraining.task import Pretraining
from bertjax.reporting import insight
from bertjax.text import tokenizer
from bertjax.training.checkpoints import checkpoint
from bertjax.training.hooks.recurrent_memory import fill_recurrent_memory
from bertjax.training.optim.schedules import make_schedule
from bertjax.training.step import Program, put_hyperparameters
from bertjax.training.trackers.jsonl import read_metrics
from tests import processes
from tests.conftest import (
    heldout_batches,
    launch_and_stop,
    make_corpus,
    one_device_mesh,
    preparing_in_process,
    pretraining_task,
)
from tests.finetuning.test_finetuning import config_for as fine_tuning_config_for
from tests.finetuning.test_finetuning import write_sst2

LENGTH, MEMORY, ROWS, HIDDEN = 16, 24, 8, 16  # the memory reaches back into the row before the last row
TEXT = make_corpus(14)
SIZES = dict(num_hidden_layers=1, hidden_size=HIDDEN, num_attention_heads=2, intermediate_size=16)


def stream_config(records="unused", **fields):
    config = pretraining_config().unlock()
    config.model = families.model_fields("transformer_xl", vocab_size=261, memory_length=MEMORY, **SIZES)
    config.tokenizer.kind = "bytes"
    config.data.update(records=str(records), next_sentence="none", masking="dynamic", heldout_fraction=0.2)
    config.data.update(dupe_factor=1, short_seq_prob=0.0, stream=True)
    config.stages = named_stages(only=stage(6, LENGTH, 3))
    config.batch_size, config.dtype, config.log_every_steps, config.unroll = ROWS, "float32", 1, "no"
    config.optimizer.update(learning_rate=1e-2, warmup_steps=0, bias_correction=True, schedule="constant")
    config.eval.update(every_steps=6, max_sequences=30, fill_masks=())
    config.checkpoint.every_steps = 3
    config.update_from_flattened_dict(fields)
    return config.lock()


@pytest.fixture(scope="session")
def text_file(built_once):
    return built_once("stream-text", lambda folder: (folder / "text.txt").write_text(TEXT)) / "text.txt"


def prepare_text(config, text_file, folder):
    config = config.copy_and_resolve_references().unlock()
    config.data.update(records="", corpus=str(text_file))
    with preparing_in_process():
        prepare(config, folder)


@pytest.fixture(scope="session")
def records(built_once, text_file):
    return built_once("stream", functools.partial(prepare_text, stream_config(), text_file))


def xlnet_config(records="unused"):
    """A stream for an XLNet with its own tokenizer."""
    config = stream_config(records).unlock()
    model_fields = dict(
        memory_length=MEMORY, initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    config.model = families.model_fields("xlnet", vocab_size=80, **SIZES | model_fields | dict(num_hidden_layers=2))
    config.tokenizer.kind = "sentencepiece"
    learn(config, "plm", plm=dict(k=4, max_span_words=2))
    validate(config.lock())
    return config


@pytest.fixture(scope="session")
def xlnet_records(built_once, text_file):
    return built_once("stream-xlnet", functools.partial(prepare_text, xlnet_config(), text_file))


def two_stages(records):
    """A run of two stages with two rows per device. The memory is reset at the start of the second stage."""
    fields = {"mesh.data": 2, "mesh.fsdp": 2, "checkpoint.every_steps": 1, "checkpoint.keep": 9, "eval.every_steps": 5}
    config = stream_config(records, **fields).unlock()
    config.stages = named_stages(first=stage(2, LENGTH, 3), then=stage(3, LENGTH, 3))
    return config.lock()


@pytest.fixture(scope="session")
def straight(records, built_once):
    """The workdir of a run of two stages without interruptions."""

    def build(folder):
        with four_devices():
            launch(two_stages(records), folder)

    return built_once("stream-run", build)


@contextlib.contextmanager
def four_devices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining_run, "make_mesh", lambda config: make_mesh(config, jax.devices()[:4]))
        yield


def rows_of(records, split):
    """Returns the arrays of all records in order."""
    files = find_records(records, LENGTH, 3, split)
    batches = list(heldout_batches(files, LENGTH, 3, batch_size=1, max_sequences=files.total))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_stream_records_are_the_text_in_order(records, xlnet_records, kind):
    """Each document has special tokens at its start and end, at any position in a sequence; all tokens are in one
    segment.
    """
    folder = records if kind == "bytes" else xlnet_records
    pieces = tokenizer.load_tokenizer(kind, folder / tokenizer.KINDS[kind].filename, True)
    rows = rows_of(folder, "train")
    assert (rows["segments"] == 1).all() and (rows["token_types"] == 0).all()
    text, place, documents_seen = "".join(map(chr, rows["input_ids"].ravel())), 0, 0
    for document in TEXT.strip().split("\n\n"):
        ids = [token for line in pieces.encode_ids(document.split("\n")) for token in line]
        document_text = "".join(map(chr, pieces.framed(ids)))
        if (at := text.find(document_text, place)) >= 0:
            assert at == place  # no separator between the document and the previous document
            place, documents_seen = at + len(document_text), documents_seen + 1
    assert documents_seen == 9 and len(text) - place < 1000  # the tenth document is cut where no whole sequence is left


SPEC = RECORD_ARRAYS | STREAM_ARRAYS


def batches_of(order, start=0, rows=np.arange):
    return pipeline.train_batches(
        order, SPEC, 3, start=start, rows=rows, transforms=[SeededTransform(StreamNextTokens())]
    )


def test_rows_continue_in_the_next_step(records):
    """Reads two epochs, from any step, with any number of hosts."""
    files, ids = find_records(records, LENGTH, 3, "train"), rows_of(records, "train")["input_ids"]
    order = Order(files, ROWS, 0, RowSize(LENGTH, 1), is_stream=True)
    starts = [row * len(ids) // ROWS for row in range(ROWS + 1)]
    steps = 2 * max(np.diff(starts)) + 1
    whole = list(itertools.islice(batches_of(order), steps))
    for row in range(ROWS):
        row_ids = ids[starts[row] : starts[row + 1]]
        read_ids = np.array([batch["input_ids"][row] for batch in whole])
        np.testing.assert_array_equal(read_ids, row_ids[np.arange(steps) % len(row_ids)])
        goes_on = [batch["continues"][row] for batch in whole]
        np.testing.assert_array_equal(goes_on, np.arange(steps) % len(row_ids) > 0)
        flat = row_ids.ravel()
        predicted = np.array([batch["word_ids"][row] for batch in whole[: len(row_ids)]]).ravel()
        weights = np.array([batch["word_weights"][row] for batch in whole[: len(row_ids)]]).ravel()
        np.testing.assert_array_equal(predicted[:-1], flat[1:])  # also the first token of the next step
        assert weights[:-1].all() and not weights[-1]
    entered = next(batches_of(order, steps - 3))
    halves = [next(batches_of(order, steps - 3, lambda count, half=half: np.arange(4) + 4 * half)) for half in (0, 1)]
    for name, x in whole[steps - 3].items():
        np.testing.assert_array_equal(entered[name], x)
        np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), x)


def test_held_out_text_is_read_once_in_parallel_rows(records):
    files, ids = find_records(records, LENGTH, 3, "heldout"), rows_of(records, "heldout")["input_ids"]
    options = dict(transforms=[SeededTransform(StreamNextTokens())], is_stream=True)
    batches = list(pipeline.heldout_batches(files, SPEC, LENGTH, 3, batch_size=ROWS, max_sequences=21, **options))
    rows = [np.concatenate([b["input_ids"][row][b["segments"][row] > 0] for b in batches]) for row in range(ROWS)]
    np.testing.assert_array_equal(np.concatenate(rows), ids[:21].ravel())
    # all tokens except the last token of each row
    assert sum(b["word_weights"].sum() for b in batches) == 21 * LENGTH - ROWS
    assert [b["continues"].tolist() for b in batches] == [[0] * ROWS, [1] * ROWS, [1] * ROWS]
    few = list(pipeline.heldout_batches(files, SPEC, LENGTH, 3, batch_size=ROWS, max_sequences=3, **options))
    assert len(few) == 1 and few[0]["sequence_weights"].sum() == 3


def after_three_steps(records, devices=1, change=lambda step, batch: batch, **fields):
    """Returns the state, and the losses and the filled memory of each step."""
    config = stream_config(records, **{"optimizer.skip_nonfinite": 2}, **fields)
    mesh = make_mesh(config, jax.devices()[:devices])
    task = pretraining_task(config, mesh, records)
    program, losses, filled = Program(task, config, mesh), [], []
    state, hyper = program.init(jax.random.key(0)), put_hyperparameters(0, make_schedule(config.optimizer, 3), mesh)
    for step, batch in enumerate(itertools.islice(task.batches(0), 3)):
        state, metrics = program.train_step(state, put_batch(change(step, batch), mesh), hyper)
        losses.append(float(metrics["loss"]))
        filled.append(int(state.carry.filled.max()))
    return state, losses, filled


@pytest.mark.slow
def test_steps_are_equal_on_any_mesh_and_with_microbatches(records):
    state, losses, _ = after_three_steps(records, 4, **{"mesh.data": 2, "mesh.fsdp": 2, "microbatches": 2})
    expected, expected_losses, filled = after_three_steps(records)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for leaf, expected_leaf in zip(jax.tree.leaves(state.carry), jax.tree.leaves(expected.carry)):
        np.testing.assert_allclose(
            leaf, expected_leaf, atol=1e-3
        )  # Adam's first steps have the size of a gradient's sign
    assert state.carry.states.addressable_shards[0].data.shape[0] == 2  # each device has only its rows
    # The memory before a skipped step does not belong to the text before the next step.
    weights = {1: np.nan}
    state, _, of_skipped = after_three_steps(
        records, change=lambda step, batch: batch | {"word_weights": batch["word_weights"] * weights.get(step, 1)}
    )
    assert filled == [LENGTH, MEMORY, MEMORY] and of_skipped == [LENGTH, 0, LENGTH]
    assert np.isfinite(jax.tree.leaves(state.params)[0]).all()


@pytest.mark.slow
def test_the_memory_of_xlnet_has_the_content_stream(xlnet_records):
    """The memory has the content states for any predicted tokens; only continued rows attend to them."""
    config = xlnet_config(xlnet_records)
    pieces = tokenizer.load_tokenizer("sentencepiece", xlnet_records / tokenizer.KINDS["sentencepiece"].filename)
    task = pretraining_task(config, one_device_mesh(config), xlnet_records, tokenizer=pieces)
    program = Program(task, config, task.mesh)
    state, model = program.init(jax.random.key(0)), XlnetModel(config_of(config))
    params = {"params": jax.device_get(state.params["bert"])}
    first, second = itertools.islice(task.batches(0), 2)
    hyper = put_hyperparameters(0, make_schedule(config.optimizer, 6), task.mesh)
    state, metrics = program.train_step(state, put_batch(first, task.mesh), hyper)
    assert "plm_loss" in metrics and state.carry.filled.tolist() == [LENGTH] * ROWS

    @jax.jit
    def read(batch, memory):
        arrays = (batch[name] for name in ("input_ids", "segments", "token_types", "word_positions"))
        see_all = np.ones((1, 1, LENGTH), bool)
        return model.apply(params, *arrays, see_all, memory=memory, method="encode_permuted")

    inputs = first["input_ids"], first["segments"], first["token_types"]
    states = model.apply(params, *inputs, every_layer=True, method="encode")
    _, _, memory = read(first, new_memory(ROWS, 2, MEMORY, HIDDEN, jnp.float32))
    np.testing.assert_allclose(memory.states[:, :, -LENGTH:], np.moveaxis(states[:-1], 0, 1), atol=1e-5)
    goes_on = np.arange(ROWS) % 2
    behind, (_, alone, _) = read(second, memory.where(goes_on)), read(second, None)
    same = np.abs(behind[1] - alone).max((1, 2)) < 1e-5
    assert same.tolist() == (goes_on == 0).tolist()
    assert behind[2].filled.tolist() == np.where(goes_on, MEMORY, LENGTH).tolist()


def assert_same(workdir, other, step):
    for name in ("params", "memory"):
        a, b = (jax.tree.leaves(checkpoint._read_item(folder, step, name, None)) for folder in (workdir, other))
        assert all(map(np.array_equal, a, b)), name


@pytest.mark.slow
def test_a_sharded_run_of_two_stages_resumes_with_identical_params(straight, records, tmp_path):
    filled = [int(jax.tree.leaves(checkpoint._read_item(straight, i, "memory", None))[0].min()) for i in range(1, 6)]
    assert filled == [LENGTH, MEMORY, LENGTH, MEMORY, MEMORY]
    workdir = shutil.copytree(straight, tmp_path / "run")
    for step in ("4", "5"):
        shutil.rmtree(workdir / checkpoint.FOLDER / step)
    with four_devices():
        launch(two_stages(records), workdir)
    assert_same(workdir, straight, 5)
    assert checkpoint.read_scores(workdir, 5).scores == checkpoint.read_scores(straight, 5).scores


@pytest.mark.slow
def test_missing_memory_is_recomputed(straight, tmp_path, capsys):
    """A branch with other rows recomputes the memory; a branch with equal rows reads the stored memory."""
    config = two_stages("").unlock()
    config.branch_from = f"{straight}@3"
    with four_devices():
        launch(config, tmp_path / "same")
        assert "reads steps" not in capsys.readouterr().out
        config.batch_size = 4
        launch_and_stop(Pretraining, config, tmp_path / "rows", 4)
    assert (
        "recurrent memory in the checkpoint: computing it from the batches of steps 2 to 3" in capsys.readouterr().out
    )
    assert_same(tmp_path / "same", straight, 5)


@pytest.mark.slow
def test_memory_is_recomputed_as_far_as_it_reaches(records, monkeypatch):
    """The memory is recomputed with current params from all earlier steps, or from as many as the layers can reach."""
    config = stream_config(records, **{"model.hidden_dropout_prob": 0.0, "model.num_hidden_layers": 2}).unlock()
    config.stages = named_stages(first=stage(6, LENGTH, 3), then=stage(3, LENGTH, 3))
    task, mesh = pretraining_task(config, one_device_mesh(config), records), one_device_mesh(config)
    program, printed = Program(task, config, mesh), []
    config.optimizer.learning_rate = 0.0  # training uses the initial params
    state, hyper = program.init(jax.random.key(1)), put_hyperparameters(0, make_schedule(config.optimizer, 6), mesh)

    def warm(step):
        return fill_recurrent_memory(task, program, program.init(jax.random.key(1)), mesh, step, printed.append).carry

    for batch in itertools.islice(task.batches(0), 6):
        state, _ = program.train_step(state, put_batch(batch, mesh), hyper)
    assert task.carry.reach == 4  # each of the two layers reaches the second-last row
    carry = warm(6)
    assert printed == ["no recurrent memory in the checkpoint: computing it from the batches of steps 3 to 6"]
    np.testing.assert_array_equal(carry.filled, state.carry.filled)
    np.testing.assert_allclose(carry.states, state.carry.states, atol=1e-5)
    assert warm(7).filled.tolist() == [LENGTH] * ROWS  # the memory of the previous step, not of the previous stage
    monkeypatch.setattr(Pretraining, "carry", task.carry._replace(reach=3))
    assert np.abs(warm(6).states - state.carry.states).max() > 1e-3


# Uses of a trained model.


def random_params(task):
    """Random params whose attention differs between positions."""
    params = jax.jit(task.init_params)(jax.random.key(3))
    return jax.tree.map(lambda x: 20 * np.asarray(x) if x.ndim > 1 else x, nn.meta.unbox(params))


@pytest.mark.slow
def test_held_out_text_is_read_with_a_separate_memory(records):
    """A memory of all tokens before a row gives the scores of one long row, with distances up to a limit."""

    def task_of(**fields):
        config = stream_config(records, **{name.replace("_", ".", 1): value for name, value in fields.items()})
        return pretraining_task(config, one_device_mesh(config), records)

    files, task = find_records(records, LENGTH, 3, "heldout"), task_of()
    options = dict(transforms=[SeededTransform(StreamNextTokens())], is_stream=True)
    batches = list(pipeline.heldout_batches(files, SPEC, LENGTH, 3, batch_size=8, max_sequences=30, **options))
    names = [name for name, x in batches[0].items() if x.ndim > 1]
    whole = {name: np.concatenate([batch[name] for batch in batches], axis=1) for name in names}
    params, scores = random_params(task), {}
    places = np.broadcast_to(np.arange(whole["input_ids"].shape[1]), whole["input_ids"].shape)
    for limit in (0, 20):
        model = BertForMaskedLM(dataclasses.replace(config_of(task.config), clamp_length=limit))
        inputs = whole["input_ids"], whole["segments"], whole["token_types"], places
        logits = jax.jit(model.apply)({"params": params}, *inputs)
        losses = -np.take_along_axis(jax.nn.log_softmax(logits[..., :261]), whole["word_ids"][..., None], -1)[..., 0]
        scores[limit] = task_of(eval_memory_length=500, eval_clamp_length=limit).evaluator.run(params, 1).scores
        expected = (losses * whole["word_weights"]).sum() / whole["word_weights"].sum()
        np.testing.assert_allclose(scores[limit]["lm_loss"], expected, rtol=1e-4)
    assert abs(scores[0]["lm_loss"] - scores[20]["lm_loss"]) > 1e-3
    assert abs(task.evaluator.run(params, 1).scores["lm_loss"] - scores[0]["lm_loss"]) > 1e-3
    assert task_of(microbatches=4).evaluator.run(params, 1).scores == task.evaluator.run(params, 1).scores


@pytest.mark.slow
def test_a_byte_level_language_model_trains_and_generates(straight, tmp_path):
    (scores,) = [line for line in read_metrics(straight) if "eval/lm_loss" in line]
    assert scores.keys() >= {"eval/unigram_loss", "eval/lm_accuracy", "eval/lm_majority"}
    assert scores["eval/lm_loss"] < 5.4 < np.log(261) and "eval/mlm_loss" not in scores  # of equally likely bytes
    assert (straight / "report.txt").read_text().startswith("held-out next words: loss")

    source, prompt = pretrained.read_pretrained(straight), "The ship"
    arguments = BertForMaskedLM(source.config), source.params, source.tokenizer
    generated = generation.generate(*arguments, prompt, 20, generation.Sampling(0.8, 50, 0.9), seed=3)
    assert generated.startswith(prompt) and len(prompt) < len(generated) <= len(prompt) + 20
    for text in (prompt, "a [MASK]"):
        refused = r"only a masked language model fills a .*; continue the text with --generate=N"
        with pytest.raises(UserError, match=refused):
            next(fill_mask.fill_masks(*arguments, [text]))
    flags = ("--generate=20", "--temperature=0.8", "--top_k=50", "--top_p=0.9", "--seed=3", "--json")
    predicted = processes.run("predict", f"--checkpoint={straight}", *flags, prompt, cwd=tmp_path)
    assert json.loads(predicted.stdout) == {"text": prompt, "continued": generated}, predicted.stderr


@pytest.mark.slow
def test_a_recurrent_model_is_fine_tuned_and_shown_without_memory(straight, tmp_path):
    _, shown = insight.attention(pretrained.read_with_tokenizer(straight), "the ship")
    assert not np.triu(shown, 1).any() and np.tril(shown, -1).any()  # attends to earlier tokens only
    write_sst2(tmp_path, train=32, dev=16)
    launch(fine_tuning_config_for(tmp_path, straight, epochs=1.0, packing=True), tmp_path / "tuned")
    tuned = pretrained.read_with_tokenizer(tmp_path / "tuned")
    assert tuned.config.memory_length == MEMORY and tuned.config.family == "transformer_xl"
    (prediction,) = tasks.get("glue").predict(tuned, [("ship sail harbour",)])
    assert prediction["label"] in ("0", "1")


@pytest.mark.parametrize("fields, message", [
    ({"packing": True}, "config.packing = True: must be False with data.stream=True"),
    ({"eval.clamp_length": -1}, "config.eval.clamp_length = -1: must be at least 0"),
    ({"data.stream": False, "eval.memory_length": 9}, "config.eval.memory_length = 9: needs data.stream=True"),
    ({"model.memory_length": 0}, "config.model.memory_length = 0: must be at least 1"),
    ({"data.dupe_factor": 2}, "config.data.dupe_factor = 2: must be 1 with data.stream=True"),
    ({"data.masking": "static"}, "config.data.masking = 'static': "),
    ({"objective": "mlm"}, "config.data.stream = True: the objective mlm does not support streams"),
    ({"stages": named_stages(only=stage(6, LENGTH, 3, batch_size=4))}, "config.stages.only.batch_size = 4: must be"),
    ({"model": pretraining_config().model}, "config.data.stream = True: model.family = 'bert' has no recurrent memory"),
])  # fmt: skip
def test_unsupported_stream_configs_are_refused(fields, message):
    config = stream_config().copy_and_resolve_references().unlock()
    for field, value in fields.items():
        section, _, name = field.rpartition(".")
        (config[section] if section else config)[name] = value
    with pytest.raises(UserError, match=f"^{re.escape(message)}.*$"):
        validate(config.lock())

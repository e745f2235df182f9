"""A stream of text, whose rows go on in the next step with a memory: its order, the state, resuming, its use."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import families, objectives, tasks
from bertjax.config import named_stages, pretraining_config, stage
from bertjax.data.batches import pipeline
from bertjax.data.batches.order import Order
from bertjax.data.batches.packing import RowSize
from bertjax.data.preparation import prepare
from bertjax.data.records import find_records
from bertjax.families import config_of
from bertjax.families.transformer_xl.model import TransformerXLModel
from bertjax.families.xlnet.model import XlnetModel
from bertjax.interop import pretrained
from bertjax.model.recurrence import new_memory
from bertjax.objectives import lm
from bertjax.sharding.mesh import make_mesh, put_batch
from bertjax.tasks import pretraining_run
from bertjax.tasks.launch import launch
from bertjax.tasks.pretraining import Pretraining
from bertjax.text import tokenizer
from bertjax.training import checkpoint
from bertjax.training.recurrence import warmed_up
from bertjax.training.schedules import make_schedule
from bertjax.training.step import make_program, put_hyperparameters
from tests.conftest import launch_and_stop, make_corpus, one_device_mesh, preparing_in_process

pytestmark = pytest.mark.usefixtures("on_one_device")
LENGTH, MEMORY, ROWS = 16, 24, 8  # the memory reaches back into the row before the last


def stream_config(records="unused", **fields):
    config = pretraining_config().unlock()
    sizes = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=48)
    config.model = families.model_fields("transformer_xl", vocab_size=261, memory_length=MEMORY, **sizes)
    config.tokenizer.kind = "bytes"
    config.data.update(records=str(records), next_sentence="none", masking="dynamic", heldout_fraction=0.2)
    config.data.update(dupe_factor=1, short_seq_prob=0.0, stream=True)
    config.stages = named_stages(only=stage(6, LENGTH, 3))
    config.batch_size, config.dtype, config.log_every_steps = ROWS, "float32", 1
    config.optimizer.update(learning_rate=1e-2, warmup_steps=0, bias_correction=True, schedule="constant")
    config.eval.update(every_steps=6, max_sequences=30, fill_masks=())
    config.checkpoint.every_steps = 3
    config.update_from_flattened_dict(fields)
    return config.lock()


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    (folder / "text.txt").write_text(make_corpus(30))
    config = stream_config("").unlock()
    config.data.corpus = str(folder / "text.txt")
    with preparing_in_process():
        prepare(config, folder / "records")
    return folder / "records"


@pytest.fixture(scope="module")
def task(records):
    config = stream_config(records)
    return Pretraining(config, one_device_mesh(config), records)


def ids_of(records, split):
    """The tokens of all records, in their order."""
    files = find_records(records, LENGTH, 3, split)
    batches = pipeline.heldout_batches(files, LENGTH, 3, batch_size=1, max_sequences=files.total)
    return np.concatenate([batch["input_ids"] for batch in batches])


def test_records_are_the_text_in_its_order(records):
    """Sentence after sentence, each document between [CLS] and [SEP], whether a sequence ends there or not."""
    pieces = tokenizer.load("bytes", records / tokenizer.KINDS["bytes"].filename, True)
    text = "".join(map(chr, ids_of(records, "train").ravel()))
    documents, place, found = make_corpus(30).split("\n\n"), 0, 0
    for document in documents:
        ids = [token for line in document.strip().split("\n") for token in pieces.encode(line).ids]
        own = "".join(map(chr, pieces.framed(ids)))
        if (at := text.find(own, place)) >= 0:
            assert at == place  # nothing is between it and the document before
            place, found = at + len(own), found + 1
    assert found >= 22 and len(text) - place < 1000  # there are 24; the last one is cut where no whole sequence is left


def batches_of(order, start=0, rows=np.arange):
    given = dict(start=start, rows=rows, additions=[lm.OBJECTIVE.addition(stream_config(), None, None)])
    return pipeline.train_batches(order, 3, **given)


@pytest.mark.slow
def test_a_row_goes_on_where_it_ended(records):
    """Through two epochs, from any step, for any number of hosts."""
    files, ids = find_records(records, LENGTH, 3, "train"), ids_of(records, "train")
    order = Order(files, ROWS, 0, RowSize(LENGTH, 1), is_stream=True)
    starts = [row * len(ids) // ROWS for row in range(ROWS + 1)]
    steps = 2 * max(np.diff(starts)) + 1
    whole = list(itertools.islice(batches_of(order), steps))
    for row in range(ROWS):
        own = ids[starts[row] : starts[row + 1]]
        found = np.array([batch["input_ids"][row] for batch in whole])
        np.testing.assert_array_equal(found, own[np.arange(steps) % len(own)])
        goes_on = [batch["goes_on"][row] for batch in whole]
        np.testing.assert_array_equal(goes_on, np.arange(steps) % len(own) > 0)
        flat = own.ravel()
        predicted = np.array([batch["word_ids"][row] for batch in whole[: len(own)]]).ravel()
        weights = np.array([batch["word_weights"][row] for batch in whole[: len(own)]]).ravel()
        np.testing.assert_array_equal(predicted[:-1], flat[1:])  # also the first token of the step after
        assert weights[:-1].all() and not weights[-1]
    entered = next(batches_of(order, steps - 3))
    halves = [next(batches_of(order, steps - 3, lambda count, half=half: np.arange(4) + 4 * half)) for half in (0, 1)]
    for name, x in whole[steps - 3].items():
        np.testing.assert_array_equal(entered[name], x)
        np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), x)


def test_held_out_text_is_read_once_side_by_side(records, task):
    files, ids = find_records(records, LENGTH, 3, "heldout"), ids_of(records, "heldout")
    given = dict(additions=[lm.OBJECTIVE.addition(stream_config(), None, None)], is_stream=True)
    batches = list(pipeline.heldout_batches(files, LENGTH, 3, batch_size=ROWS, max_sequences=21, **given))
    rows = [np.concatenate([b["input_ids"][row][b["segments"][row] > 0] for b in batches]) for row in range(ROWS)]
    np.testing.assert_array_equal(np.concatenate(rows), ids[:21].ravel())
    assert sum(b["word_weights"].sum() for b in batches) == 21 * LENGTH - ROWS  # all but the last of each row
    assert [b["goes_on"].tolist() for b in batches] == [[0] * ROWS, [1] * ROWS, [1] * ROWS]
    few = list(pipeline.heldout_batches(files, LENGTH, 3, batch_size=ROWS, max_sequences=3, **given))
    assert len(few) == 1 and few[0]["sequence_weights"].sum() == 3


@pytest.mark.slow
def test_two_steps_with_memory_are_one_of_twice_the_length(task):
    config, model = task.model.config, TransformerXLModel(task.model.config)
    ids = np.random.default_rng(0).integers(0, 261, (2, 2 * LENGTH))
    ones = np.ones_like(ids)
    params = model.init(jax.random.key(0), ids, ones, ones)

    @jax.jit
    def both():
        straight = model.apply(params, ids, ones, ones, method="encode")
        memory, parts = new_memory(2, 2, MEMORY, 32, jnp.float32), []
        for part in (slice(LENGTH), slice(LENGTH, None)):
            inputs = ids[:, part], ones[:, part], ones[:, part]
            hidden, memory = model.apply(params, *inputs, memory=memory, method="encode")
            parts.append(hidden)
        emptied = model.apply(params, *inputs, memory=memory.where(jnp.array([False, True])), method="encode")[0]
        alone = model.apply(params, *inputs, method="encode")
        return straight, jnp.concatenate(parts, axis=1), memory, emptied, alone

    straight, parts, memory, emptied, alone = both()
    np.testing.assert_allclose(parts, straight, atol=1e-5)
    assert memory.filled.tolist() == [MEMORY, MEMORY] and config.memory_length >= LENGTH
    np.testing.assert_allclose(emptied[0], alone[0], atol=1e-5)
    assert np.abs(emptied[1] - alone[1]).max() > 1e-2


class Copying(Pretraining):
    """Rows whose tokens are those of the step before; new ones every eighth step. `remembers`: whether rows go on."""

    remembers = True

    def batches(self, start_step):
        for step in itertools.count(start_step):
            ids = np.random.default_rng(step // 8).integers(0, 8, (ROWS, LENGTH)).astype(np.int32)
            every, zeros = np.ones_like(ids), np.zeros(ROWS, np.int32)
            yield {
                "input_ids": ids, "segments": every, "token_types": 0 * ids, "pair_labels": zeros,
                "word_positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
                "word_ids": np.roll(ids, -1, 1), "word_weights": every.astype(np.float32),
                "sequence_weights": np.ones(ROWS, np.float32), "goes_on": zeros + (self.remembers and step % 8 > 0),
            }  # fmt: skip


def trained(task_class, config, mesh, steps):
    """The state after some steps, and the losses."""
    task = task_class(config, mesh, None)
    program = make_program(task, config, mesh)
    state, losses = program.init(jax.random.key(0)), []
    hyper = put_hyperparameters(0, make_schedule(config.optimizer, steps), mesh)
    for batch in itertools.islice(task.batches(0), steps):
        state, metrics = program.train_step(state, put_batch(batch, mesh), hyper)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.slow
def test_memory_helps_where_text_repeats():
    """One layer is enough for it. Without memory nothing is known but that there are eight tokens."""
    sizes = {"model.num_hidden_layers": 1, "model.initializer_range": 0.2, "model.hidden_dropout_prob": 0.0}
    config = stream_config(**sizes, **{"optimizer.learning_rate": 5e-3})
    mesh = one_device_mesh(config)
    _, with_memory = trained(Copying, config, mesh, 160)
    _, without = trained(type("Forgetful", (Copying,), {"remembers": False}), config, mesh, 160)
    assert np.mean(with_memory[-16:]) < 1 and 1.8 < np.mean(without[-16:])


def xlnet_config(records="", **fields):
    """A stream that an XLNet reads, with pieces of its own."""
    config = stream_config(records).unlock()
    sizes = dict(vocab_size=80, num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=48)
    config.model = families.model_fields("xlnet", memory_length=MEMORY, initializer_range=0.2, **sizes)
    config.tokenizer.kind = "sentencepiece"
    objectives.learn(config, "plm", plm=dict(k=4, max_span_words=2))
    config.update_from_flattened_dict(fields)
    tasks.validate(config.lock())
    return config


@pytest.fixture(scope="module", params=["google", "compact"])
def xlnet_records(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"xlnet-{request.param}")
    (folder / "text.txt").write_text(make_corpus(30))
    layout = {"data.corpus": str(folder / "text.txt"), "data.layout": request.param}
    with preparing_in_process():
        prepare(xlnet_config(**layout), folder / "records")
    return folder / "records"


@pytest.mark.slow
def test_an_xlnet_reads_documents_that_end_with_cls_in_one_segment(xlnet_records):
    pieces = tokenizer.load("sentencepiece", xlnet_records / tokenizer.KINDS["sentencepiece"].filename)
    files = find_records(xlnet_records, LENGTH, 3, "train")
    rows = list(pipeline.heldout_batches(files, LENGTH, 3, batch_size=1, max_sequences=files.total))
    assert all((row["segments"] == 1).all() and (row["token_types"] == 0).all() for row in rows)
    text = " ".join(str(token) for row in rows for token in row["input_ids"].ravel())
    framed = [
        " ".join(map(str, pieces.framed([token for ids in pieces.encode_ids(document.split("\n")) for token in ids])))
        for document in make_corpus(30).strip().split("\n\n")
    ]
    assert sum(document in text for document in framed) >= 22  # a few are held out, and one is cut
    assert text.split().count(str(pieces.cls_id)) == text.count(f"{pieces.sep_id} {pieces.cls_id}") >= 22


@pytest.mark.slow
@pytest.mark.parametrize("xlnet_records", ["compact"], indirect=True)
def test_an_xlnet_remembers_what_its_tokens_were(xlnet_records, tmp_path):
    """Its states of content, whatever is predicted; a row that goes on sees them, one that does not does not."""
    config, records = xlnet_config(xlnet_records), xlnet_records
    launch(config, tmp_path)
    assert "plm_loss" in checkpoint.read_scores(tmp_path, 6).scores
    assert all(np.abs(found).max() > 0 for found in items_of(tmp_path, 6, "memory"))

    pieces = tokenizer.load("sentencepiece", records / tokenizer.KINDS["sentencepiece"].filename)
    task, model = Pretraining(config, one_device_mesh(config), records, tokenizer=pieces), XlnetModel(config_of(config))
    first, second = itertools.islice(task.batches(0), 2)
    params = {"params": pretrained.read(tmp_path).params["bert"]}
    memory = new_memory(ROWS, 2, MEMORY, 32, jnp.float32)

    def read(batch, memory):
        given = (batch[name] for name in ("input_ids", "segments", "token_types", "word_positions"))
        see_all = np.ones((1, 1, LENGTH), bool)
        return model.apply(params, *given, see_all, memory=memory, method="encode_permuted")

    _, _, memory = read(first, memory)
    inputs = first["input_ids"], first["segments"], first["token_types"]
    states = model.apply(params, *inputs, every_layer=True, method="encode")
    np.testing.assert_allclose(memory.states[:, :, -LENGTH:], np.moveaxis(states[:-1], 0, 1), atol=1e-5)
    assert memory.filled.tolist() == [LENGTH] * ROWS
    goes_on = np.arange(ROWS) % 2
    behind, (_, alone, _) = read(second, memory.where(goes_on)), read(second, None)
    same = np.abs(behind[1] - alone).max((1, 2)) < 1e-5
    assert same.tolist() == (goes_on == 0).tolist()
    assert behind[2].filled.tolist() == np.where(goes_on, MEMORY, LENGTH).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"microbatches": 2}, {"mesh.data": 4, "mesh.fsdp": 2}])
def test_any_mesh_and_number_of_microbatches_gives_the_same(one, fields):
    config = stream_config(**fields)
    mesh = make_mesh(config) if "mesh.data" in fields else one_device_mesh(config)
    state, losses = trained(Copying, config, mesh, 3)
    np.testing.assert_allclose(losses, one[1], rtol=1e-5)
    for found, expected in zip(jax.tree.leaves(state.memory), jax.tree.leaves(one[0].memory)):
        np.testing.assert_allclose(found, expected, atol=1e-3)  # Adam's first steps have the size of a gradient's sign
    rows = state.memory.states.addressable_shards[0].data.shape[0]
    assert rows == (1 if "mesh.data" in fields else ROWS)  # each device has its own rows only


@pytest.fixture(scope="module")
def one():
    config = stream_config()
    return trained(Copying, config, one_device_mesh(config), 3)


@pytest.fixture(scope="module")
def straight(records, tmp_path_factory, on_one_device):
    folder = tmp_path_factory.mktemp("straight")
    launch(stream_config(records), folder)
    return folder


def items_of(workdir, step, *names):
    found = [checkpoint._read(workdir, step, name, None) for name in names]
    return [np.asarray(x) for x in jax.tree.leaves(found)]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(straight, records, tmp_path):
    launch_and_stop(Pretraining, stream_config(records), tmp_path, 4)
    assert checkpoint.steps(tmp_path)[-1] < 6
    launch(stream_config(records), tmp_path)
    for a, b in zip(items_of(tmp_path, 6, "params", "memory"), items_of(straight, 6, "params", "memory"), strict=True):
        np.testing.assert_array_equal(a, b)
    assert checkpoint.read_scores(tmp_path, 6).scores == checkpoint.read_scores(straight, 6).scores


@pytest.mark.slow
def test_a_sharded_run_of_two_stages_goes_on_bit_for_bit(records, tmp_path, monkeypatch):
    """Each device has a row's memory. It is emptied where a stage begins, and a jump into the next reads it again."""
    monkeypatch.setattr(pretraining_run, "make_mesh", make_mesh)
    config = stream_config(records, **{"mesh.data": 4, "mesh.fsdp": 2, "checkpoint.every_steps": 1}).unlock()
    config.stages, config.checkpoint.keep = named_stages(first=stage(2, LENGTH, 3), then=stage(3, LENGTH, 3)), 9
    config.eval.every_steps = 5
    launch(config.lock(), tmp_path / "straight")
    filled = [int(items_of(tmp_path / "straight", step, "memory")[0].min()) for step in range(1, 6)]
    assert filled == [LENGTH, MEMORY, LENGTH, MEMORY, MEMORY]
    launch_and_stop(Pretraining, config, tmp_path / "stopped", 4)
    launch(config, tmp_path / "stopped")
    found = [items_of(tmp_path / folder, 5, "params", "memory") for folder in ("stopped", "straight")]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)

    task = Pretraining(config, make_mesh(config), records)
    program = make_program(task, config, task.mesh)
    state = warmed_up(task, program, program.init(jax.random.key(1)), task.mesh, 3, [].append)
    assert state.memory.filled.tolist() == [LENGTH] * ROWS  # of the step before, and not of the stage before


@pytest.mark.slow
def test_memory_that_no_checkpoint_has_is_read_again(straight, tmp_path, capsys):
    """By a branch with other rows."""
    branch = {"branch_from": f"{straight}@3", "data.records": "", "batch_size": 4}
    launch(stream_config("", **branch), tmp_path / "rows")
    assert "the checkpoint has no memory of these rows: reads steps 1 to 3 again" in capsys.readouterr().out
    assert checkpoint.steps(tmp_path / "rows")[-1] == 6
    launch(stream_config("", **branch | {"batch_size": ROWS}), tmp_path / "same")
    assert "reads steps" not in capsys.readouterr().out
    for a, b in zip(items_of(tmp_path / "same", 6, "params", "memory"), items_of(straight, 6, "params", "memory")):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_memory_is_warmed_up_as_far_as_it_reaches(records, monkeypatch):
    """What its params make of all steps from the first on, or of so many that the rest cannot be seen."""
    config = stream_config(records, **{"model.hidden_dropout_prob": 0.0})
    task, mesh = Pretraining(config, one_device_mesh(config), records), one_device_mesh(config)
    program, said = make_program(task, config, mesh), []
    params = program.init(jax.random.key(1)).params
    model, step = TransformerXLModel(config_of(config)), 6
    memory = new_memory(ROWS, 2, MEMORY, 32, jnp.float32)
    for batch in itertools.islice(task.batches(0), step):
        goes_on = memory.where(batch["goes_on"] > 0)
        inputs = batch["input_ids"], batch["segments"], batch["token_types"]
        memory = model.apply({"params": params["bert"]}, *inputs, memory=goes_on, method="encode")[1]
    assert task.recurrence.reach == 4  # two layers, each of which sees into the second row before
    state = warmed_up(task, program, program.init(jax.random.key(1)), mesh, step, said.append)
    assert said == ["the checkpoint has no memory of these rows: reads steps 3 to 6 again to fill it"]
    np.testing.assert_array_equal(state.memory.filled, memory.filled)
    np.testing.assert_allclose(state.memory.states, memory.states, atol=1e-5)
    shorter = task.recurrence._replace(reach=3)
    monkeypatch.setattr(Pretraining, "recurrence", shorter)
    state = warmed_up(task, program, program.init(jax.random.key(1)), mesh, step, said.append)
    assert np.abs(state.memory.states - memory.states).max() > 1e-3


@pytest.mark.slow
def test_a_step_that_is_skipped_leaves_no_memory(records):
    """That of the step before is not what comes before the next one."""
    config = stream_config(records, **{"optimizer.skip_nonfinite": 2})
    task, mesh = Pretraining(config, one_device_mesh(config), records), one_device_mesh(config)
    program = make_program(task, config, mesh)
    state, hyper = program.init(jax.random.key(0)), put_hyperparameters(0, make_schedule(config.optimizer, 6), mesh)
    broken = [False, True, False]
    filled = []
    for batch, is_broken in zip(itertools.islice(task.batches(0), 3), broken):
        weights = batch["word_weights"] * (np.nan if is_broken else 1)
        state, _ = program.train_step(state, put_batch(batch | {"word_weights": weights}, mesh), hyper)
        filled.append(int(state.memory.filled.max()))
    assert filled == [LENGTH, 0, LENGTH] and np.isfinite(jax.tree.leaves(state.params)[0]).all()

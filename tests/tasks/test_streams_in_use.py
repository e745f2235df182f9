"""A stream of text in use: held-out text by longer memories, several hosts, fine-tuning, what cannot go on."""

import dataclasses
import functools
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import tasks
from bertjax.config import UserError, named_stages, pretraining_config, stage
from bertjax.data.batches import pipeline
from bertjax.data.records import find_records
from bertjax.families import config_of
from bertjax.families.with_heads import BertForMaskedLM
from bertjax.interop import pretrained
from bertjax.objectives import lm
from bertjax.reporting import insight
from bertjax.sharding.mesh import make_mesh
from bertjax.tasks import adaptation, bits, pretraining_run
from bertjax.tasks.launch import launch
from bertjax.tasks.pretraining import Pretraining
from bertjax.text import tokenizer
from bertjax.training.step import make_program
from tests.conftest import one_device_mesh
from tests.tasks.test_finetuning import config_for as fine_tuning_config_for
from tests.tasks.test_finetuning import write_sst2
from tests.tasks.test_streams import LENGTH, MEMORY, items_of, records, straight, stream_config  # noqa: F401  fixtures
from tests.test_several_hosts import EXPERIMENT, assert_same_run, finish, start

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.mark.slow
def test_held_out_text_is_read_with_a_memory_of_its_own(records):  # noqa: F811
    """One that holds all before makes of a row what reading it at once does, at distances up to a limit."""
    found, pieces = {}, {}
    for limit in (0, 20):
        config = stream_config(records, **{"eval.memory_length": 500, "eval.clamp_length": limit})
        task = Pretraining(config, one_device_mesh(config), records)
        params = jax.jit(task.init_params)(jax.random.key(3))
        params = jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, nn.meta.unbox(params))
        found[limit] = task.evaluate(params, 1).scores["lm_loss"]
        files = find_records(records, LENGTH, 3, "heldout")
        given = dict(additions=[lm.OBJECTIVE.addition(config, None, None)], is_stream=True)
        batches = list(pipeline.heldout_batches(files, LENGTH, 3, batch_size=8, max_sequences=30, **given))
        names = ("input_ids", "segments", "token_types", "word_ids", "word_weights")
        whole = {name: np.concatenate([batch[name] for batch in batches], axis=1) for name in names}
        model = BertForMaskedLM(dataclasses.replace(config_of(config), clamp_length=limit))
        places = np.broadcast_to(np.arange(whole["input_ids"].shape[1]), whole["input_ids"].shape)
        logits = model.apply({"params": params}, *(whole[name] for name in names[:3]), places)
        words, weights = whole["word_ids"], whole["word_weights"]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits[..., :261]), words[..., None], -1)[..., 0]
        pieces[limit] = (losses * weights).sum() / weights.sum()
        np.testing.assert_allclose(found[limit], pieces[limit], rtol=1e-4)
    assert abs(found[0] - found[20]) > 1e-3
    task = Pretraining(stream_config(records), task.mesh, records)
    assert abs(task.evaluate(params, 1).scores["lm_loss"] - found[0]) > 1e-3


@pytest.mark.slow
def test_bits_of_held_out_text_are_read_with_that_memory(records, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(adaptation, "WINDOW_BYTES", (150, 200))
    found = {}
    for memory in (0, 500):
        fields = {"eval.memory_length": memory, "eval.bits_windows": 2, "data.corpus": str(records.parent / "text.txt")}
        config = stream_config(records, **fields)
        task = pretraining_run.KIND.open(config, tmp_path / str(memory), None).task
        params = jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, jax.jit(task.init_params)(jax.random.key(3)))
        params = nn.meta.unbox(params)
        scores = task.evaluate(params, 1).scores
        (found[memory],) = (value for name, value in scores.items() if name.startswith("bits_per_byte"))
    (windows,) = adaptation.read(tmp_path / "500").windows.values()
    texts = [window["text"] for window in windows]
    pieces = tokenizer.load("bytes", records / tokenizer.KINDS["bytes"].filename, True)
    for memory, number in found.items():
        model = BertForMaskedLM(dataclasses.replace(config_of(config), memory_length=memory or MEMORY))
        expected = bits.bits_per_byte(model, params, pieces, texts, [[False]] * len(texts), LENGTH)["bits_per_byte"]
        np.testing.assert_allclose(number, expected, rtol=1e-5)
    assert abs(found[0] - found[500]) > 1e-2


@pytest.mark.slow
def test_held_out_scores_do_not_depend_on_microbatches(records):  # noqa: F811
    found = []
    for microbatches in (1, 4):
        config = stream_config(records, microbatches=microbatches)
        task = Pretraining(config, one_device_mesh(config), records)
        params = make_program(task, config, task.mesh).init(jax.random.key(0)).params
        found.append(task.evaluate(params, 1).scores)
    assert found[0] == found[1]


@pytest.mark.slow
def test_two_hosts_go_on_in_a_stream_where_one_stopped(records, tmp_path, monkeypatch):  # noqa: F811
    """Each has the memory of its own rows, from the checkpoint of one."""
    config = stream_config(records)
    monkeypatch.setattr(pretraining_run, "make_mesh", make_mesh)  # of eight devices, as those of the two together
    launch(config, tmp_path / "alone")
    workdir = shutil.copytree(tmp_path / "alone", tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints/6")
    (workdir / "report.txt").unlink()
    path = tmp_path / "stream.py"
    path.write_text(EXPERIMENT.format(text=config.to_json_best_effort()))
    first, second = finish(start(2, f"--config={path}", f"--workdir={workdir}"))
    assert first[0] == second[0] == 0, (first[2] + second[2])[-3000:]
    assert "no memory of these rows" not in first[1]
    assert_same_run(workdir, tmp_path / "alone")
    memories = [items_of(folder, 6, "memory") for folder in (workdir, tmp_path / "alone")]
    for ours, theirs in zip(*memories, strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.slow
def test_it_is_fine_tuned_and_shown_without_memory(straight, tmp_path):  # noqa: F811
    source = pretrained.read_with_tokenizer(straight)
    pieces, shown = insight.attention(source, "the ship")
    assert shown.shape == (2, 2, len(pieces), len(pieces))
    np.testing.assert_allclose(shown.sum(-1), 1, atol=1e-5)
    assert not np.triu(shown, 1).any() and np.tril(shown, -1).any()  # it sees what comes before, and nothing else
    write_sst2(tmp_path)
    launch(fine_tuning_config_for(tmp_path, straight, epochs=1.0, packing=True), tmp_path / "tuned")
    tuned = pretrained.read_with_tokenizer(tmp_path / "tuned")
    assert tuned.config.memory_length == MEMORY and tuned.config.family == "transformer_xl"
    (found,) = tasks.get("glue").predict(tuned, [("ship sail harbour",)])
    assert found["label"] in ("0", "1")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"packing": True}, "config.packing = True: rows that go on in the next step (data.stream) are full"),
        ({"eval.clamp_length": -1}, "config.eval.clamp_length = -1: must be at least 0"),
        ({"data.stream": False, "eval.memory_length": 9}, "config.eval.memory_length = 9: is of rows that go on"),
        ({"model.memory_length": 0}, "config.model.memory_length = 0: must be at least 1"),
        ({"model.memory_length": -3}, "config.model.memory_length = -3: must be at least 1"),
        ({"data.dupe_factor": 2}, "config.data.dupe_factor = 2: a stream of text is cut into whole sequences, once"),
        ({"data.masking": "static"}, "config.data.masking = 'static': "),
        ({"objective": "mlm"}, "config.data.stream = True: mlm reads sequences by themselves, not text that goes on"),
        ({"stages": named_stages(only=stage(6, LENGTH, 3, batch_size=4))}, "config.stages.only.batch_size = 4: rows"),
        ({"model": pretraining_config().model}, "config.data.stream = True: model.family = 'bert' has no memory"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_told(fields, message):
    config = stream_config().copy_and_resolve_references().unlock()
    for field, value in fields.items():
        section, _, name = field.rpartition(".")
        (config[section] if section else config)[name] = value
    with pytest.raises(
        UserError, match="^" + functools.reduce(lambda s, c: s.replace(c, "\\" + c), "().", message)
    ) as error:
        tasks.validate(config.lock())
    assert "\n" not in str(error.value)


def test_a_mesh_that_does_not_divide_the_rows_is_told(records):  # noqa: F811
    config = stream_config(records, **{"batch_size": 6})
    with pytest.raises(UserError, match=r"^config.batch_size = 6: .* must be a multiple of the 8 devices"):
        Pretraining(config, make_mesh(config), records)

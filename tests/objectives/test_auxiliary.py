"""Auxiliary losses: what they are by definition, when layers stop, and that only the last layer is evaluated."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import experiment, objectives, tasks
from bertjax.config import UserError, named_stages, stage
from bertjax.data.preparation import prepare
from bertjax.interop import pretrained
from bertjax.objectives import auxiliary
from bertjax.tasks import adaptation, pretraining_run
from bertjax.tasks.launch import launch
from bertjax.tasks.pretraining import Pretraining
from bertjax.training import checkpoint
from bertjax.training.sinks.jsonl import read_metrics
from tests.conftest import launch_and_stop, one_device_mesh, preparing_in_process
from tests.training.test_loop import leaves

pytestmark = pytest.mark.usefixtures("on_one_device")
LAYERS, STEPS, WIDTH = 3, 12, 32


def config_for(corpus, records="", packing=True, **settings):
    config = experiment.load("characters:cores")
    config.model.update(hidden_size=WIDTH, num_hidden_layers=LAYERS, intermediate_size=64, max_position_embeddings=64)
    config.stages, config.batch_size, config.packing = named_stages(only=stage(STEPS, 64, 10)), 8, packing
    config.data.update(corpus=str(corpus), records=str(records), heldout_fraction=0.15)
    config.update(dict(dtype="float32", log_every_steps=1, unroll="no"))
    config.optimizer.warmup_steps = 0
    config.eval.update(every_steps=STEPS, max_sequences=16)
    config.objectives.auxiliary.update(settings)
    return config


@pytest.fixture(scope="module")
def records(corpus_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters") / "records"
    with preparing_in_process():
        prepare(config_for(corpus_file), folder)
    return folder


def task_for(*given, **fields):
    config = config_for(*given, **fields)
    tasks.validate(config)
    return Pretraining(config, one_device_mesh(config), config.data.records)


def by_definition(task, params, batch, settings):
    """The mean over next characters of each layer's auxiliary losses, sequence by sequence: `[LAYERS]`."""
    read = (batch.get(name) for name in ("input_ids", "segments", "token_types", "positions"))
    encode = jax.jit(lambda *given: task.model.bind({"params": params}).bert.encode(*given, every_layer=True))
    states, params = jax.device_get((encode(*read), params))
    totals, count = np.zeros(LAYERS), 0
    for row, segments in enumerate(batch["segments"]):
        for segment in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == segment)[:-1]  # without the last [SEP]
            count += len(places) - 1
            for layer in range(1, LAYERS + 1):
                name, number, first = (auxiliary.LAST, 0, 2) if layer == LAYERS else (auxiliary.LAYERS, layer - 1, 1)
                for target, ahead in enumerate(range(first, settings.targets + 1)):
                    kernel, bias = (params[name]["layers"][each][number, target] for each in ("kernel", "bias"))
                    logits = (states[layer, row, places[:-ahead]] @ kernel.T + bias)[:, :261]
                    words = batch["input_ids"][row, places[ahead:]]
                    losses = np.log(np.exp(logits).sum(1)) - np.take_along_axis(logits, words[:, None], 1)[:, 0]
                    totals[layer - 1] += (1.0 if ahead == 1 else settings.target_weight) * losses.sum()
    return totals / count


@pytest.mark.slow
@pytest.mark.parametrize(
    "packing, settings", [(False, {}), (True, dict(targets=3, target_weight=0.25, layers_until=1.0))]
)
def test_losses_and_gradients_while_layers_stop(corpus_file, records, packing, settings):
    """All in one compiled function: the progress is an input."""
    task, settings = task_for(corpus_file, records, packing, **settings), auxiliary.AuxiliarySettings(**settings)
    params = nn.meta.unbox(jax.jit(task.init_params)(jax.random.key(0)))
    batch = next(task.batches(5))
    assert (batch["progress"] == np.float32(5 / STEPS)).all()
    told = task.abstract_batch(0)
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in told.items()}
    step = jax.jit(jax.value_and_grad(lambda p, b: task.loss(p, task.normalize(b)), has_aux=True))
    each = by_definition(task, params, batch, settings)
    for progress in (0.0, 0.16, 0.17, 0.34, 0.9):
        given = batch | {"progress": np.full_like(batch["progress"], progress)}
        (loss, metrics), gradient = step(params, given)
        learns = np.array([progress < settings.layers_until * layer / LAYERS for layer in range(1, LAYERS)])
        np.testing.assert_allclose(metrics["auxiliary_loss"], each @ [*learns, True], rtol=1e-5)
        np.testing.assert_allclose(loss, metrics["lm_loss"] + metrics["auxiliary_loss"], rtol=1e-6)
        kernels = gradient[auxiliary.LAYERS]["layers"]["kernel"]
        assert (np.abs(kernels).max((1, 2, 3)) > 0).tolist() == learns.tolist()
        assert np.abs(gradient[auxiliary.LAST]["layers"]["kernel"]).max() > 0
    assert step._cache_size() == 1


def test_what_nothing_predicts_with_has_no_params(corpus_file, records):
    def layers_of(**settings):
        task = task_for(corpus_file, records, **settings)
        params = nn.meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
        return {name: params[name]["layers"]["kernel"].shape for name in params if name != "bert"}

    assert layers_of() == {auxiliary.LAYERS: (LAYERS - 1, 2, 384, WIDTH), auxiliary.LAST: (1, 1, 384, WIDTH)}
    assert layers_of(layers_until=0.0, targets=4) == {auxiliary.LAST: (1, 3, 384, WIDTH)}
    assert layers_of(targets=1) == {auxiliary.LAYERS: (LAYERS - 1, 1, 384, WIDTH)}


def test_flops_are_those_of_all_output_layers(corpus_file, records):
    def flops(objective, **settings):
        config = config_for(corpus_file, records, packing=False, **settings)
        config.objective = objective
        return Pretraining(config, one_device_mesh(config), records).flops(0, 1)

    for settings, predicted in ((dict(targets=3), 3 * (LAYERS - 1) + 2), (dict(layers_until=0.0, targets=5), 4)):
        expected = 3 * 8 * 63 * 2 * WIDTH * 384 * predicted  # three passes of eight rows
        assert flops("lm + auxiliary", **settings) - flops("lm") == expected


@pytest.fixture(scope="module")
def trained(corpus_file, records, tmp_path_factory):
    """A straight run, and one that was stopped after step 7 and resumed."""
    folder, config = tmp_path_factory.mktemp("auxiliary"), config_for(corpus_file, records)
    launch(config, folder / "straight")
    launch_and_stop(Pretraining, config, folder / "run", step=7)
    launch(config, folder / "run")
    return folder / "straight", folder / "run"


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit(trained):
    straight, resumed = (leaves(checkpoint.read_params(folder, STEPS)) for folder in trained)
    assert straight.keys() == resumed.keys() and any(auxiliary.LAYERS in name for name in straight)
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)
    losses = [line["train/auxiliary_loss"] for line in read_metrics(trained[0]) if "train/loss" in line]
    nats = np.log(261)  # of a character at first, so that four layers' losses are told from two's and from none
    assert losses[0] > 3 * nats and losses[-1] < nats


@pytest.mark.slow
def test_only_the_last_layer_is_evaluated(trained, corpus_file, records):
    """As by a run that has learnt nothing else, with the same params."""
    (line,) = [line for line in read_metrics(trained[0]) if line["step"] == STEPS and "eval/lm_loss" in line]
    assert not any("auxiliary" in name for name in line if name.startswith("eval/"))
    config = config_for(corpus_file, records)
    config.objective = "lm"
    alone = Pretraining(config, one_device_mesh(config), records)
    params = jax.tree.map(jnp.asarray, checkpoint.read_params(trained[0], STEPS))
    scores = alone.evaluate({name: params[name] for name in ("bert",)}, STEPS).scores
    for name, score in scores.items():
        np.testing.assert_allclose(line[f"eval/{name}"], score, rtol=1e-5)


@pytest.mark.slow
def test_bits_per_byte_of_a_run_that_starts_from_nothing(trained, corpus_file, records, tmp_path, monkeypatch):
    source, config = pretrained.read(trained[1]), config_for(corpus_file, records)
    assert source.config.positions == "each_layer" and source.predicts_words
    monkeypatch.setattr(adaptation, "WINDOW_BYTES", (20, 30))  # all rows have one length
    config.eval.bits_windows = 4
    task = pretraining_run.KIND.open(config, tmp_path, None).task
    scores = task.evaluate(jax.tree.map(jnp.asarray, source.params), STEPS).scores
    (bits,) = (value for name, value in scores.items() if name.startswith("bits_per_byte"))
    text = adaptation.read(tmp_path)
    (windows,) = text.windows.values()
    assert not text.before and len(windows) == 4 and 1 < bits < np.log2(261)
    after = dict.fromkeys(text.windows, adaptation.Measured(bits_per_byte=bits, tokens_per_word=5.0))
    assert text.report(after) == [f"held-out text of {corpus_file}: bits per byte {bits:.3f}; tokens per word 5.000"]


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"objective": "auxiliary"},
            "config.objective = 'auxiliary': auxiliary only helps others to be learnt; put one",
        ),
        ({"objective": "auxiliary + lm"}, "config.objective = .*: auxiliary only helps others to be learnt; put one"),
        (
            {"objective": "nsp + auxiliary", "data.next_sentence": "pairs"},
            "what the last layer predicts is missing: write 'lm . auxiliary'",
        ),
        ({"model.causal": False}, "learns words as mlm, not as lm"),
        ({"objectives.auxiliary.targets": 0}, "config.objectives.auxiliary.targets = 0: must be at least 1"),
        ({"objectives.auxiliary.layers_until": 1.5}, "auxiliary.layers_until = 1.5: must be at least 0 and at most 1"),
        ({"objectives.auxiliary.target_weight": 0.0}, "auxiliary.target_weight = 0.0: must be above 0"),
        ({"objectives.auxiliary.targets": 1, "objectives.auxiliary.layers_until": 0.0}, "nothing is predicted besides"),
        ({"objective": "lm"}, "config.objectives.auxiliary: lm is learnt, without it; leave it out"),
        ({"eval.bits_windows": 3, "data.corpus": None}, "config.data.corpus = None: eval.bits_windows = 3 are of held"),
    ],
)
def test_what_cannot_be_learnt_is_said(fields, message):
    config = config_for("corpus", "records")
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=message) as error:
        tasks.validate(config)
    assert "\n" not in str(error.value)


def test_it_is_found_by_its_name():
    assert objectives.OBJECTIVES.get("auxiliary").is_auxiliary and not objectives.OBJECTIVES.get("lm").is_auxiliary

"""Auxiliary losses: their definition, the end of the loss of a layer, and bits per byte of a run."""

import jax
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.interop import pretrained
from bertjax.launch.validate import validate
from bertjax.objectives import auxiliary
from bertjax.objectives.parsing import learn
from bertjax.pretraining import adaptation
from bertjax.pretraining import run as pretraining_run
from tests.conftest import one_device_mesh, pretraining_task
from tests.curves import configs
from tests.objectives.test_objectives import assert_as_planned, params_of

pytestmark = pytest.mark.usefixtures("on_one_device")
LAYERS, WIDTH, STEPS = 3, 16, 10


def config_for(records="records", packing=True, **settings):
    config = configs()["transformer-auxiliary"]
    config.model.num_hidden_layers, config.packing, config.data.records = LAYERS, packing, str(records)
    config.stages.only.steps = STEPS
    learn(config, "lm + auxiliary", auxiliary=settings)
    return config


@pytest.fixture(scope="module")
def run(request):
    """The workdir of a run with two layers."""
    return request.getfixturevalue("pretrained")("transformer-auxiliary")


def task_for(records=None, **fields):
    config = config_for(records or "records", **fields)
    validate(config)
    return pretraining_task(config, one_device_mesh(config), records)


def by_definition(task, params, batch, settings):
    """Computes the mean auxiliary loss of each layer over next characters, sequence by sequence: `[LAYERS]`."""
    read = (batch.get(name) for name in ("input_ids", "segments", "token_types", "positions"))
    encode = jax.jit(lambda *inputs: task.loss.model.bind({"params": params}).bert.encode(*inputs, every_layer=True))
    states, params = jax.device_get((encode(*read), params))
    totals, count = np.zeros(LAYERS), 0
    for row, segments in enumerate(batch["segments"]):
        for segment in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == segment)[:-1]  # without the final [SEP]
            count += len(places) - 1
            for layer in range(1, LAYERS + 1):
                name, number, first = (
                    (auxiliary.LAST, 0, 2) if layer == LAYERS else (auxiliary.INTERMEDIATE, layer - 1, 1)
                )
                for target, ahead in enumerate(range(first, settings.targets + 1)):
                    kernel, bias = (params[name]["layers"][part][number, target] for part in ("kernel", "bias"))
                    logits = (states[layer, row, places[:-ahead]] @ kernel.T + bias)[:, :261]
                    words = batch["input_ids"][row, places[ahead:]]
                    losses = np.log(np.exp(logits).sum(1)) - np.take_along_axis(logits, words[:, None], 1)[:, 0]
                    totals[layer - 1] += (1.0 if ahead == 1 else settings.target_weight) * losses.sum()
    return totals / count


@pytest.mark.slow
@pytest.mark.parametrize(
    "packing, settings", [(False, {}), (True, dict(targets=3, target_weight=0.25, layers_until=1.0))]
)
def test_losses_and_gradients_while_layers_are_switched_off(run, packing, settings):
    """One compiled function serves all values: the progress is an input."""
    task, settings = task_for(run / "records", packing=packing, **settings), auxiliary.AuxiliaryLosses(**settings)
    params = params_of(task)
    batch = next(task.batches(5))
    assert (batch["progress"] == np.float32(5 / STEPS)).all()
    assert_as_planned(task, batch)
    step = jax.jit(jax.value_and_grad(lambda p, b: task.loss(p, task.loss.normalize(b)), has_aux=True))
    layer_losses = by_definition(task, params, batch, settings)
    for progress in (0.0, 0.16, 0.17, 0.34, 0.9):
        batch_at_progress = batch | {"progress": np.full_like(batch["progress"], progress)}
        (loss, metrics), gradient = step(params, batch_at_progress)
        learns = np.array([progress < settings.layers_until * layer / LAYERS for layer in range(1, LAYERS)])
        np.testing.assert_allclose(metrics["auxiliary_loss"], layer_losses @ [*learns, True], rtol=1e-5)
        np.testing.assert_allclose(loss, metrics["lm_loss"] + metrics["auxiliary_loss"], rtol=1e-6)
        kernels = gradient[auxiliary.INTERMEDIATE]["layers"]["kernel"]
        assert (np.abs(kernels).max((1, 2, 3)) > 0).tolist() == learns.tolist()
        assert np.abs(gradient[auxiliary.LAST]["layers"]["kernel"]).max() > 0
    assert step._cache_size() == 1


def test_flops_include_all_auxiliary_heads():
    def flops(objective, **settings):
        config = config_for(packing=False, **settings)
        config.objective = objective
        return pretraining_task(config, one_device_mesh(config), None).flops(0, 1)

    for settings, predicted in ((dict(targets=3), 3 * (LAYERS - 1) + 2), (dict(layers_until=0.0, targets=5), 4)):
        expected = 3 * 8 * 31 * 2 * WIDTH * 384 * predicted  # three passes of eight rows
        assert flops("lm + auxiliary", **settings) - flops("lm") == expected


@pytest.mark.slow
def test_bits_per_byte_of_a_run_from_scratch(run, corpus_file, tmp_path, monkeypatch):
    source, config = pretrained.read_pretrained(run), configs()["transformer-auxiliary"]
    assert source.predicts_words
    monkeypatch.setattr(adaptation, "WINDOW_BYTES", (20, 30))  # all rows have one length
    config.eval.bits_windows = 4
    config.data.update(corpus=str(corpus_file), records=str(run / "records"))
    config, _ = pretraining_run.KIND.resolve(config, None)
    task = pretraining_run.KIND.open(config, tmp_path, None).task
    scores = task.evaluator.run(jax.device_put(source.params), STEPS).scores
    (bits,) = (value for name, value in scores.items() if name.startswith("bits_per_byte"))
    text = adaptation.read_heldout_text(tmp_path)
    (windows,) = text.windows.values()
    assert not text.before and len(windows) == 4 and 1 < bits < np.log2(261)
    after = dict.fromkeys(text.windows, adaptation.TextScores(bits_per_byte=bits, tokens_per_word=5.0))
    assert text.report(after) == [f"held-out text of {corpus_file}: bits per byte {bits:.3f}; tokens per word 5.000"]


@pytest.mark.parametrize("fields, message", [
    ({"objective": "auxiliary"},
     "config.objective = 'auxiliary': the first objective must be evaluated"),
    ({"objective": "auxiliary + lm"}, "config.objective = .*: the first objective must be evaluated"),
    ({"objective": "nsp + auxiliary", "data.next_sentence": "pairs"},
     "auxiliary needs the objective lm; set 'lm . auxiliary'"),
    ({"model.causal": False}, "needs a causal language model, and config.model is a masked language model"),
    ({"objectives.auxiliary.targets": 0}, "config.objectives.auxiliary.targets = 0: must be at least 1"),
    ({"objectives.auxiliary.layers_until": 1.5}, "auxiliary.layers_until = 1.5: must be at least 0 and at most 1"),
    ({"objectives.auxiliary.target_weight": 0.0}, "auxiliary.target_weight = 0.0: must be above 0"),
    ({"objectives.auxiliary.targets": 1, "objectives.auxiliary.layers_until": 0.0}, "has no loss if targets = 1"),
    ({"objective": "lm"}, "config.objectives.auxiliary: the run trains lm, not auxiliary; remove the field"),
    ({"eval.bits_windows": 3, "data.corpus": None}, "config.data.corpus = None: eval.bits_windows = 3 needs held-out"),
])  # fmt: skip
def test_unsupported_configs_are_refused(fields, message):
    config = config_for()
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)

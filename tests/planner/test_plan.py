"""The shipped configs, compiled for TPUs by libtpu: memory and network transfers. No TPU is needed."""

import dataclasses
import json
import math
import pathlib

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, stage
from bertjax.config.model_config import model_size
from bertjax.config.resolved import ResolvedConfig
from bertjax.config.stages import stages_of
from bertjax.distributed.mesh import make_mesh
from bertjax.distributed.topology import GENERATIONS, accelerator
from bertjax.finetuning import run as finetuning_run
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.models.heads import model_flops
from bertjax.objectives.parsing import learn
from bertjax.planner import summary
from bertjax.planner.plan import OutOfMemory, _candidates, plan, settings_that_fit
from bertjax.pretraining.data import estimate_packed_rows
from bertjax.reranking.task import SAMPLE_DOCUMENTS
from bertjax.training.optim.optimizers import make_optimizer
from bertjax.training.state import abstract_axes, make_layout
from experiments import embed, glue, rerank, small
from tests.conftest import pretraining_task
from tests.golden import make_hbm
from tests.processes import ROOT, run

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/hbm.json").read_text())
COMPILED_AGAIN = "small:tiny v5litepod-16"


def total_bytes(collectives, **fields):
    """Sums the bytes of the collectives with these fields."""
    return sum(c.bytes for c in collectives if all(getattr(c, name) == value for name, value in fields.items()))


def tiny(**mesh):
    """A config that compiles quickly: small arrays, and no bertjax kernels."""
    config = small.get_config("tiny")
    config.model.update(vocab_size=256, num_hidden_layers=1, max_position_embeddings=64)
    config.stages, config.batch_size = named_stages(short=stage(10, 32, 5)), 32
    config.mesh.update(mesh)
    return config


def matrix_count(config) -> int:
    """Counts the numbers in kernels and tables of a pre-training model: all params except biases and LayerNorm."""
    m = config.model
    layer = 4 * m.hidden_size**2 + 2 * m.hidden_size * m.intermediate_size
    tables = (m.vocab_size + m.max_position_embeddings + m.type_vocab_size) * m.hidden_size
    return m.num_hidden_layers * layer + tables + 2 * m.hidden_size**2 + 2 * m.hidden_size


@pytest.fixture(scope="module")
def data_parallel():
    """The first stage of a stored measurement, on 16 chips."""
    config = make_hbm.load(COMPILED_AGAIN)
    (result,) = plan(config, make_hbm.target(COMPILED_AGAIN), [0])
    return config, result


def summed_bytes(result, **fields) -> int:
    return sum(total_bytes(result.collectives, kind=kind, **fields) for kind in ("all-reduce", "reduce-scatter"))


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_data_parallelism_transfers_weights_and_gradients_once_a_step(data_parallel):
    config, result = data_parallel
    assert not [c for c in result.collectives if c.in_loop], result.collectives
    assert {c.axes for c in result.collectives} == {("data",)}
    gathered = total_bytes(result.collectives, kind="all-gather")
    # In bfloat16, except the matrices of the heads; gradients in float32, with some scores.
    assert 2 * matrix_count(config) <= gathered < 2.1 * matrix_count(config)
    assert 4 * matrix_count(config) <= summed_bytes(result) < 4.1 * matrix_count(config)


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_gradients_can_be_transferred_in_bfloat16_and_between_slices():
    config = tiny()
    config.grad_dtype, config.microbatches = "bfloat16", 2
    (result,) = plan(config, accelerator("v5litepod-4", slices=2))
    assert result.chips == 8 and result.fits
    halves = summed_bytes(result, dtype="bf16")
    # Once within each slice, and once more between the two slices, for the share of a chip.
    assert 2 * matrix_count(config) <= halves < 4.1 * matrix_count(config), result.collectives
    assert summed_bytes(result, dtype="f32") < 0.01 * halves
    assert not [c for c in result.collectives if c.in_loop]


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_embeddings_and_gradients_are_transferred_once_a_step_with_microbatches():
    config = embed.get_config()
    config.model.update(model_size("1-64-2"), vocab_size=128, max_position_embeddings=16)
    config.batch_size, config.microbatches, config.max_seq_length, config.kernels = 128, 4, 16, "no"
    target = accelerator("v5litepod-4")
    (result,) = plan(config, target, real_tokens_share=[0.5])
    assert result.fits and (result.rows, result.length) == (128, 16)
    assert not [c for c in result.collectives if c.in_loop], result.collectives
    params, documents = 4 * result.params_bytes, 4 * 128 * 64
    gathered = total_bytes(result.collectives, kind="all-gather")
    # Weights travel in bfloat16. Embeddings, as factors of products, may do so. Gradients travel in float32.
    assert 0.95 * params + documents <= 2 * gathered < 1.1 * (params + 4 * documents)
    assert 0.95 * params <= summed_bytes(result) < 1.1 * (params + 4 * documents)
    assert result.flops_per_step > 6 * 128 * 16 * 12 * 64**2
    assert '"steps": null' in summary.as_json([result]) and "days" not in summary.as_table([result], target)


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_recurrent_memory_stays_on_the_chips_of_the_rows():
    """One layer keeps 16 states for each of the two rows of a chip; evaluation has a memory three times as long."""
    config = tiny(data=2, fsdp=2)
    sizes = dict(vocab_size=256, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    config.unlock().model = families.model_fields("transformer_xl", memory_length=16, **sizes)
    learn(config.lock(), "lm")
    config.data.update(stream=True, next_sentence="none", masking="dynamic", dupe_factor=1, short_seq_prob=0.0)
    config.batch_size, config.eval.memory_length, config.eval.fill_masks = 8, 48, ()
    validate(config, with_data=False)
    (result,) = plan(config, accelerator("v5litepod-4"))
    assert result.fits and result.rows == 8 and 0 < result.estimated_mfu < 1
    assert result.memory_bytes == 2 * 16 * 32 * 2 + 2 * 4  # bfloat16 states, and the number of filled positions
    axes = {axis for collective in result.collectives for axis in collective.axes}
    assert axes <= {"data", "fsdp"}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    "fields, documents",
    [
        ({"loss.name": "binary_cross_entropy"}, 1),
        ({"loss.name": "list_net"}, 2),  # the columns `positive` and `negative`
        ({"loss.name": "list_net", "data.form": "lists", "data.texts": "q,d", "data.label": "y"}, SAMPLE_DOCUMENTS),
        ({"loss.name": "multiple_negatives", "loss.negatives": 3}, 5),
    ],
)
def test_a_batch_of_a_reranker_has_all_documents_of_its_lists(fields, documents, packing):
    config = rerank.get_config()
    config.model.update(model_size("1-64-2"), vocab_size=128, max_position_embeddings=64)
    config.update(dict(batch_size=16, max_seq_length=64, packing=packing))
    config.update_from_flattened_dict({"data.path": "x", **fields})
    validate(config, with_data=False)
    mesh = make_mesh(config, jax.devices()[:1])
    task, (planned,) = finetuning_run.KIND.planning.open(ResolvedConfig.copy_of(config), mesh, [0.5] * packing)
    pairs, tokens = 16 * documents, 32 if packing else 64
    assert planned.stage.batch_size == 16
    rows, length = planned.batch["input_ids"].shape
    assert rows == planned.rows and rows * length == pairs * tokens
    assert planned.batch["labels"].shape[-1] == 3 and planned.batch["labels"].size >= 3 * pairs
    model = task.loss.model.config
    assert task.flops(0, 1) == 3 * model_flops(model, rows, length, 0) >= 6 * pairs * tokens * 12 * 64**2


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_reranker_is_planned():
    config = rerank.get_config()
    config.model.update(model_size("1-64-2"), vocab_size=128, max_position_embeddings=64)
    config.update(dict(batch_size=16, max_seq_length=64, kernels="no"))
    config.data.path, config.loss.name = "x", "multiple_negatives"
    target = accelerator("v5litepod-4")
    (result,) = plan(config, target, real_tokens_share=[0.5])
    assert result.fits and result.rows * result.length == 16 * 6 * 32 and 0 < result.estimated_mfu < 1
    assert not [c for c in result.collectives if c.in_loop], result.collectives


def test_tasks_with_data_dependent_shapes_are_refused():
    with pytest.raises(UserError, match=r"config\.task = 'glue': `compile` supports only pretraining, embed"):
        finetuning_run.KIND.planning.open(glue.get_config("mrpc"), None, ())
    config = embed.get_config()
    config.max_seq_length = 600
    with pytest.raises(UserError, match=r"config\.max_seq_length = 600: longer than model\.max_position_.* = 512"):
        finetuning_run.KIND.planning.open(config, None, ())


def optimizer_is_shared(config, result) -> bool:
    """Returns whether a chip has its share of two moments of 4 bytes."""
    vectors = 2 * 20 * config.model.intermediate_size + config.model.vocab_size  # biases and LayerNorm, at most
    share = 8 * matrix_count(config) / result.chips
    is_twice_params = math.isclose(2 * result.params_bytes, result.optimizer_bytes, rel_tol=1e-3)
    return share <= result.optimizer_bytes < share + 8 * vectors and is_twice_params


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_fsdp_gathers_weights_layer_by_layer():
    config = tiny(data=2, fsdp=2)
    config.model.num_hidden_layers = 2
    (result,) = plan(config, accelerator("v5litepod-4"))
    assert optimizer_is_shared(config, result)
    in_loop = [c for c in result.collectives if c.in_loop]
    assert in_loop and {c.axes for c in in_loop} == {("fsdp",)}, in_loop


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_the_memory_equals_the_stored_measurement(data_parallel):
    """The tolerance is 5 %: releases of libtpu differ by less, a lost sharding differs by more."""
    assert optimizer_is_shared(*data_parallel)
    measured, golden = make_hbm.row(COMPILED_AGAIN, data_parallel[1]), GOLDEN[COMPILED_AGAIN][0]
    assert measured["gflops_per_step"] == golden["gflops_per_step"]
    for field in ("params_mib", "optimizer_mib", "hbm_used_mib"):
        assert math.isclose(measured[field], golden[field], rel_tol=0.05, abs_tol=1), (field, measured, golden)


def abstract_mesh(config, target) -> AbstractMesh:
    devices = target.chips * target.generation.devices_per_chip
    left = devices // math.prod(size for size in config.mesh.values() if size != -1)
    sizes = {axis: left if size == -1 else size for axis, size in config.mesh.items()}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def bytes_of(arrays, shardings, target) -> int:
    """Returns the bytes of a chip's shards of arrays."""
    parts = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, arrays, shardings)
    return sum(jax.tree.leaves(parts)) * target.generation.devices_per_chip


@pytest.mark.slow
@pytest.mark.parametrize("experiment", sorted({name.rpartition(" ")[0] for name in GOLDEN}))
def test_the_stored_measurements_match_the_current_configs(experiment):
    """Compares all values that need no compiler. After a change, run tests/golden/make_hbm.py."""
    names = [name for name in GOLDEN if name.rpartition(" ")[0] == experiment]
    first_config = make_hbm.load(names[0])
    one_device = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), tuple(first_config.mesh))
    init_params = pretraining_task(first_config, one_device, None).init_params
    optimizer = make_optimizer(first_config.optimizer, abstract_axes(init_params))
    params = nn.meta.unbox(jax.eval_shape(init_params, jax.random.key(0)))
    moments = jax.eval_shape(optimizer.init, params)
    for name in names:
        config, target = make_hbm.load(name), make_hbm.target(name)
        mesh = abstract_mesh(config, target)
        layout = make_layout(init_params, optimizer, mesh).state
        at_rest = [bytes_of(params, layout.params, target), bytes_of(moments, layout.opt_state, target)]
        rows = estimate_packed_rows(config, mesh, make_hbm.REAL_TOKENS) if config.packing else None
        task, stages = pretraining_task(config, one_device, None, rows=rows), stages_of(config)
        # the other rows are parts of these rows
        grown = [number for number, stage in enumerate(stages) if not stage.grows]
        assert [row["stage"] for row in GOLDEN[name]] == grown
        for first, row in zip((stages[number].first_step for number in grown), GOLDEN[name]):
            assert row["config"] == make_hbm.fingerprint(name)
            assert [row["params_mib"], row["optimizer_mib"]] == [size >> 20 for size in at_rest]
            flops = task.flops(first, first + 1)
            assert row["gflops_per_step"] == flops // 10**9
            assert row["hbm_available_mib"] == int(target.generation.hbm_bytes) >> 20
            assert row["fits"] and sum(at_rest) < row["hbm_used_mib"] << 20 <= target.generation.hbm_bytes
            # Not faster than the hardware.
            assert row["estimated_step_microseconds"] > 1e6 * flops / (target.chips * target.generation.peak_flops)


def test_the_page_has_the_stored_measurements():
    page = (pathlib.Path(__file__).parents[2] / "docs/accelerators.md").read_text()
    for name, rows in GOLDEN.items():
        if ":" in name:
            continue
        used = " / ".join(f"{stage['hbm_used_mib'] / 1024:.1f}" for stage in rows)
        steps = " / ".join(f"{stage['estimated_step_microseconds'] / 1000:,.0f}" for stage in rows)
        config, _, topology = name.rpartition(" ")
        available = f"{rows[0]['hbm_available_mib'] / 1024:.1f}"
        assert f"| {config} | {topology} | {used} of {available} GiB | {steps} ms |" in page


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_suggested_setting_fits_all_failed_stages(data_parallel, monkeypatch):
    config, whole = data_parallel
    too_big = dataclasses.replace(whole, hbm_used_bytes=whole.hbm_available_bytes + 1)

    def needs_two_microbatches(config, accelerator, stages, _):
        """Stage 0 fits with `remat` alone; stage 1 needs microbatches as well."""
        fitting = (config.remat != "none", config.microbatches == 2)
        return [whole if fitting[number] else too_big for number in stages]

    monkeypatch.setattr("bertjax.planner.plan.plan", needs_two_microbatches)
    target = accelerator("v5litepod-16")
    assert next(settings_that_fit(config, target, [0])) == {"remat": "dots"}
    assert next(settings_that_fit(config, target, [0, 1])) == {"remat": "full", "microbatches": 2}


@pytest.mark.tpu_aot
def test_memory_saving_candidates_are_finite():
    config = tiny(data=1, fsdp=-1)
    tried = list(_candidates(config, accelerator("v5litepod-4")))
    assert {"remat": "dots"} in tried and {"remat": "full", "microbatches": 2} in tried
    assert not [settings for settings in tried if "mesh.fsdp" in settings]  # fsdp has all devices already
    config.mesh.update(data=4, fsdp=1)
    splits = [settings for settings in _candidates(config, accelerator("v5litepod-4")) if "mesh.fsdp" in settings]
    assert splits == [{"remat": "full", "mesh.data": -1, "mesh.fsdp": ways} for ways in (2, 4)]


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_config_that_does_not_fit_is_reported_with_a_fitting_setting():
    config = tiny()
    config.batch_size = 2**20
    target = accelerator("v5litepod-1")
    (result,) = plan(config, target)
    assert not result.fits and result.hbm_used_bytes > result.hbm_available_bytes
    line = summary.out_of_memory([result, result], {"remat": "full", "microbatches": 2})
    assert line.count("stage short (length 32) runs out of memory by") == 2
    assert line.endswith("; it fits with --config.remat=full --config.microbatches=2")
    assert "does not fit" in summary.as_table([result], target)
    (row,) = json.loads(summary.as_json([result]))
    assert row["estimated_step_seconds"] is None and row["hbm_used_bytes"] > row["hbm_available_bytes"]


def test_memory_errors_of_the_compiler_are_parsed():
    loud = OutOfMemory("RESOURCE_EXHAUSTED: ... Ran out of memory in memory space hbm. Used 20.51G of 15.75G hbm. Exce")
    assert loud.needed == int(20.51 * 2**30)
    assert OutOfMemory("total memory required for HLO temporaries (96.00G) exceeds available HBM").needed == 96 * 2**30
    assert OutOfMemory("RESOURCE_EXHAUSTED: something else").needed is None


def test_accelerator_names_follow_gcloud():
    shapes = {
        "v2-8": (4, (2, 2)), "v3-32": (16, (4, 4)), "v4-8": (4, (2, 2, 1)), "v4-64": (32, (2, 4, 4)),
        "v5litepod-8": (8, (2, 4)), "v5litepod-256": (256, (16, 16)), "v5p-8": (4, (2, 2, 1)), "v6e-1": (1, (1, 1)),
        "tpu7x-16": (8, (2, 2, 2)),
    }  # fmt: skip
    for name, (chips, shape) in shapes.items():
        assert (accelerator(name).chips, accelerator(name).shape) == (chips, shape), name
    assert accelerator("v5litepod-16", slices=4).chips == 64
    for name in ("v9-8", "v5litepod", "v5litepod-3", "v4-4", ""):
        with pytest.raises(UserError, match=r"--topology=.*: unknown; choose one of"):
            accelerator(name)
    with pytest.raises(UserError, match=r"--topology=v5e-16: unknown; choose one of v2-N, .*v5litepod-N, .*tpu7x-N"):
        accelerator("v5e-16")
    with pytest.raises(UserError, match="--slices=0"):
        accelerator("v4-8", slices=0)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("prefix", GENERATIONS)
def test_libtpu_supports_every_generation(prefix):
    generation = GENERATIONS[prefix]
    for chips in generation.chips[:3]:
        target = accelerator(f"{prefix}-{chips * (2 if generation.counts_cores else 1)}")
        devices = target.devices()
        assert len(devices) == chips * generation.devices_per_chip
        assert devices[0].device_kind.startswith(generation.kind)


@pytest.mark.tpu_aot
def test_the_command_prints_json(tmp_path):
    experiment = tmp_path / "short.py"
    experiment.write_text(
        "from bertjax.config import model_size, named_stages, pretraining_config, stage\n\ndef get_config():\n"
        "    config = pretraining_config()\n    config.model.update(**model_size('1-32-2'), vocab_size=128)\n"
        "    config.stages = named_stages(only=stage(0, 64, 10, tokens=5120, ramp_from=4, ramp_tokens=1280))\n"
        "    config.batch_size, config.optimizer.average, config.kernels = 8, 0.99, 'no'\n    return config\n"
    )
    packed = ("--config.packing=True", "--real_tokens_share=0.4")
    arguments = f"--config={experiment}", "--topology=v6e-4", "--json", "--price=2", *packed
    done = run("compile", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row.keys() == {
        "stage", "steps", "chips", "batch_size", "rows", "length", "remat", "unroll", "params_bytes",
        "optimizer_bytes", "hbm_used_bytes", "hbm_available_bytes", "flops_per_step", "estimated_step_seconds",
        "estimated_mfu", "estimated_cost_dollars", "least_step_seconds", "most_mfu", "least_cost_dollars",
        "collectives", "roofline",
    }  # fmt: skip
    assert (row["stage"], row["steps"]) == ("only", 10)  # five of half a batch
    assert (row["chips"], row["batch_size"], row["rows"]) == (4, 8, 4)  # 3.2 rows of sequences, on four chips
    assert row["params_bytes"] + row["optimizer_bytes"] < row["hbm_used_bytes"] < row["hbm_available_bytes"]
    assert 0 < row["estimated_mfu"] < 1 and row["most_mfu"] is None
    cost = row["steps"] * row["estimated_step_seconds"] / 3600 * 4 * 2
    assert math.isclose(row["estimated_cost_dollars"], cost) and row["least_cost_dollars"] is None


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--topology=v5litepod-7"], "--topology=v5litepod-7: unknown; choose one of v5litepod-1, v5litepod-4"),
        (["--topology=v4-8", "extra"], "unexpected argument 'extra'"),
        (["--topology=v4-8", "--config.packing=True"], "--real_tokens_share=: with config.packing, give one"),
        (["--topology=v4-8", "--config.packing=True", "--real_tokens_share=0.7,1.2"], "share=0.7,1.2: with"),
        (["--topology=v4-8", "--config.packing=True", "--real_tokens_share=half,1"], "share=half,1: with"),
        (["--topology=v4-8", "--real_tokens_share=0.7,0.5"], "0.7,0.5: also set --config.packing=True"),
    ],
)
def test_mistakes_print_one_line(flags, message):
    done = run("compile", "--config=experiments/base.py", *flags, cwd=ROOT)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr, done.stderr


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"mesh.data": 3}, "the product must be 8, the number of devices"),
        ({"batch_size": 250}, "config.batch_size = 250: "),
        ({"mesh.tensor": 2, "mesh.data": 1, "mesh.fsdp": 4}, "config.mesh.data = 1: must be a multiple of the 2 slice"),
    ],
)
def test_a_batch_that_the_chips_do_not_divide_is_named(settings, message):
    config = tiny()
    config.update_from_flattened_dict(settings)
    with pytest.raises(UserError, match=message):
        plan(config, accelerator("v4-8", slices=2))


def test_missing_libtpu_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"libtpu is not installed: pip install 'bertjax\[aot\]'"):
        accelerator("v4-8").devices()

"""What the tests share: eight simulated devices, a small made-up corpus, and records prepared from it once."""

import os

from tests.processes import QUICK_TO_COMPILE

# Tests compile much and compute little: no time for optimizations.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        QUICK_TO_COMPILE,
        "--xla_force_host_platform_device_count=8",
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"

# Run after run the same small programs are compiled, and by the processes that tests start as well.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/bertjax/compiled"))

import concurrent.futures
import contextlib
import gc
import importlib.util
import pathlib
import random
import signal

import jax
import pytest

from bertjax.config import named_stages, pretraining_config, stage
from bertjax.sharding.mesh import make_mesh

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

# JAX traces by making many small objects that live on: looking through them after each 700 takes a tenth of the time.
gc.freeze()
gc.set_threshold(50_000)

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

FOLDER = pathlib.Path(__file__).parent

# Files that take ten seconds or more, longest first: or one worker would be left with the last of them.
LONG = (
    "interop/test_parity.py",
    "test_how_to.py",
    "planner/test_plan.py",
    "tasks/test_pretraining.py",
    "tasks/test_vector_losses.py",
    "tasks/test_streams.py",
    "tasks/test_packing.py",
    "objectives/test_replaced.py",
    "families/test_xlnet.py",
    "model/test_gpu_kernels.py",
    "objectives/test_objectives.py",
    "training/test_loop.py",
    "test_several_hosts.py",
    "model/test_flash_attention.py",
    "model/test_kernels.py",
    "families/test_modernbert.py",
    "test_tutorials.py",
    "test_stages.py",
    "test_commands.py",
    "test_extending.py",
    "tasks/test_streams_in_use.py",
    "tasks/test_trained_params.py",
    "tasks/test_finetuning.py",
    "tasks/test_adaptation.py",
    "families/test_relatives.py",
    "tasks/test_exported.py",
    "data/test_pipeline.py",
    "families/test_eurobert.py",
    "tpu/test_notebook.py",
    "reporting/test_report.py",
    "objectives/test_auxiliary.py",
    "objectives/test_replaced_in_use.py",
    "model/test_variants.py",
    "data/test_packing.py",
    "data/test_preparation.py",
    "tasks/test_likelihood.py",
    "families/test_own_family.py",
    "tpu/test_launch.py",
    "test_fuzz.py",
    "objectives/test_plm.py",
    "tasks/test_distillation.py",
    "tasks/test_own_task.py",
    "tasks/test_sweep.py",
    "interop/test_replaced_parity.py",
    "tasks/test_classify.py",
    "training/test_frozen.py",
    "tasks/test_squad.py",
    "tasks/test_features.py",
    "interop/test_real_weights.py",
    "model/test_bert.py",
    "training/test_damage.py",
    "test_faults.py",
    "tasks/test_generation.py",
    "interop/test_transformer_xl_parity.py",
)


def pytest_configure(config):
    config.option.loadscopereorder = False  # of xdist, which would begin with the files of most tests


def pytest_collection_modifyitems(items):
    order = {FOLDER / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(LONG)))
    for marker, modules in (("tpu_aot", ["libtpu"]), ("gpu_aot", ["jax_cuda12_plugin", "jax_cuda13_plugin"])):
        if not any(map(importlib.util.find_spec, modules)):
            for item in items:
                if item.get_closest_marker(marker):
                    reason = f"{' or '.join(modules)} is not installed, which is for x86-64 Linux"
                    item.add_marker(pytest.mark.skip(reason=reason))


TOPICS = {
    "sea": "ship sail harbour wave captain anchor island storm whale net".split(),
    "kitchen": "bread oven butter knife plate soup onion kettle spoon recipe".split(),
    "court": "judge witness verdict lawyer trial prison evidence oath jury appeal".split(),
    "garden": "rose spade hedge seed beetle pond gate apple ladder compost".split(),
}


def make_corpus(documents: int, seed: int = 0) -> str:
    """Documents of simple sentences, each about one topic; a blank line between documents."""
    rng = random.Random(seed)
    texts = []
    for _ in range(documents):
        words = TOPICS[rng.choice(sorted(TOPICS))]
        lines = [
            f"The {rng.choice(words)} {rng.choice(['saw', 'found', 'left'])} the {rng.choice(words)} near the "
            f"{rng.choice(words)}, and a {rng.choice(words)} stayed."
            for _ in range(rng.randint(4, 12))
        ]
        texts.append("\n".join(lines))
    return "\n\n".join(texts) + "\n"


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """Spares each run the second that its page takes; `test_report` and the commands, in processes, draw theirs."""
    if request.path.name != "test_report.py" and "with_pictures" not in request.fixturenames:
        monkeypatch.setattr("bertjax.reporting.page.write", lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def products_of_float32():
    """Has dtype "auto" mean float32, whatever this processor multiplies faster; tests of bfloat16 name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertjax.sharding.mesh.cpu_dtype", lambda: "float32")
        yield


@contextlib.contextmanager
def without_compilation_cache():
    """What is compiled for a TPU that is not there can be written to the cache, but not be read."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture
def with_pictures():
    """Runs of this test draw their pages."""


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(make_corpus(80))
    return path


def tiny_config(corpus="", records=""):
    """Two short stages of a model that compiles in seconds."""
    config = pretraining_config()
    config.data.update(corpus=str(corpus), records=str(records), heldout_fraction=0.15, dupe_factor=3)
    config.model.update(
        vocab_size=150,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    config.stages = named_stages(short=stage(6, 32, 5), long=stage(4, 64, 10))
    config.batch_size, config.dtype = 16, "float32"  # also in processes that tests start
    config.optimizer.update(learning_rate=3e-3, warmup_steps=2)
    config.log_every_steps = 2
    config.eval.update(every_steps=5, max_sequences=40, fill_masks=("the [MASK] saw the [MASK] .",))
    config.checkpoint.every_steps = 5
    return config


@contextlib.contextmanager
def preparing_in_process():
    """`prepare` without processes of its own, which take seconds to start."""
    from bertjax.data import preparation
    from bertjax.data.preparation import vocabulary

    class Pool(concurrent.futures.Executor):
        def submit(self, function, *arguments):
            future = concurrent.futures.Future()
            future.set_result(function(*arguments))
            return future

    @contextlib.contextmanager
    def worker_pool(_):
        yield Pool()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "worker_pool", worker_pool)
        patch.setattr(vocabulary, "worker_pool", worker_pool)
        yield


@pytest.fixture
def in_process():
    with preparing_in_process():
        yield


@pytest.fixture(scope="session")
def records_folder(corpus_file, tmp_path_factory):
    """Records of `tiny_config`."""
    from bertjax.data.preparation import prepare

    folder = tmp_path_factory.mktemp("records") / "out"
    with preparing_in_process():
        prepare(tiny_config(corpus_file), folder)
    return folder


def one_device_mesh(config):
    return make_mesh(config, jax.devices()[:1])


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden snapshots anew")


def launch_and_stop(task_class, config, workdir, step: int) -> None:
    """Launches a run that Ctrl-C stops before the batch of `step`."""
    from bertjax.tasks.launch import launch

    batches = task_class.batches

    def stopped(self, start):
        for number, batch in enumerate(batches(self, start), start):
            if number == step:
                raise KeyboardInterrupt
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_class, "batches", stopped)
        with pytest.raises(KeyboardInterrupt):
            launch(config, workdir)

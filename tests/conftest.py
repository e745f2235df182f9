"""Fixtures of all tests: eight simulated devices, a small made-up corpus, and prepared records."""

import os

from tests.processes import QUICK_TO_COMPILE, in_process_pool

# Tests compile much and compute little: no time for optimizations.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        QUICK_TO_COMPILE,
        "--xla_force_host_platform_device_count=8",
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"

# Repeated test runs, and the processes that tests start, compile the same small programs.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/bertjax/compiled"))

import collections
import contextlib
import functools
import gc
import importlib.util
import json
import math
import pathlib
import random
import shutil
import signal
import tarfile
import time
import zlib
from collections.abc import Callable

import filelock
import jax
import pytest

from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.data.loading.readers import plain
from bertjax.distributed.mesh import make_mesh

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

# Tracing in JAX makes many small objects that stay alive: a garbage collection after each 700 takes a tenth of the
# time.
gc.freeze()
gc.set_threshold(50_000)

# Background jobs of a shell ignore Ctrl-C. The processes that tests start and interrupt would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

FOLDER = pathlib.Path(__file__).parent

# Seconds of each test that takes half a second or more. `pytest -m '' --write-durations` rewrites the file.
DURATIONS = FOLDER / "durations.json"
SHORT = 0.1  # seconds of a test that the file does not list

# The workers inherit the time at which the controller began.
BEGAN = float(os.environ.setdefault("BERTJAX_TESTS_BEGAN", str(time.time())))


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden snapshots")
    parser.addoption("--write-durations", action="store_true", help=f"rewrite {DURATIONS.name}")
    parser.addoption(
        "--minutes",
        type=float,
        default=math.inf,
        help="skip the tests that would begin later than this; the day decides which half of the files comes first",
    )


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would start with the files that have the most tests
    if config.option.write_durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationsWriter())


@pytest.hookimpl(trylast=True)  # after the marker expression has deselected tests
def pytest_collection_modifyitems(config, items):
    order_files(items, in_part=config.option.minutes < math.inf)
    for marker, modules in (("tpu_aot", ["libtpu"]), ("gpu_aot", ["jax_cuda12_plugin", "jax_cuda13_plugin"])):
        if not any(map(importlib.util.find_spec, modules)):
            for item in items:
                if item.get_closest_marker(marker):
                    reason = f"{' or '.join(modules)} is not installed, which is for x86-64 Linux"
                    item.add_marker(pytest.mark.skip(reason=reason))


def order_files(items: list[pytest.Item], in_part: bool) -> None:
    """Sorts the tests: files in descending order of their seconds, so that no worker ends with a long file.

    With `in_part`, the files of one half come first. The half changes from day to day.
    """
    durations = json.loads(DURATIONS.read_text())
    seconds: collections.Counter[pathlib.Path] = collections.Counter()
    for item in items:
        seconds[item.path] += durations.get(item.nodeid, SHORT)
    day = int(BEGAN // 86_400)

    def position(item):
        later = in_part and (zlib.crc32(item.path.name.encode()) + day) % 2
        return later, -seconds[item.path], item.path

    items.sort(key=position)


def pytest_runtest_setup(item):
    if time.time() - BEGAN > 60 * item.config.option.minutes:
        pytest.skip(f"not begun within {item.config.option.minutes:g} minutes")


class DurationsWriter:
    """Stores the seconds of each test, with its fixtures, in `DURATIONS`. Tests that did not run keep their seconds."""

    def __init__(self):
        self.seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        if not report.skipped:
            self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        merged = {**json.loads(DURATIONS.read_text()), **self.seconds}
        long = {name: round(merged[name], 1) for name in sorted(merged) if merged[name] >= 0.5}
        DURATIONS.write_text(json.dumps(long, indent=0) + "\n")


TOPICS = {
    "sea": "ship sail harbour wave captain anchor island storm whale net".split(),
    "kitchen": "bread oven butter knife plate soup onion kettle spoon recipe".split(),
    "court": "judge witness verdict lawyer trial prison evidence oath jury appeal".split(),
    "garden": "rose spade hedge seed beetle pond gate apple ladder compost".split(),
}


def extract_golden_workdir(folder) -> None:
    """Extracts the run of an older version to `folder / "run"`."""
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
    with tarfile.open(FOLDER / "golden/workdir.tar.gz") as archive:
        archive.extractall(folder, **safe)


def make_corpus(documents: int, seed: int = 0) -> str:
    """Documents of simple sentences about one topic per document; a blank line between documents."""
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
    """Skips the pages of runs, which take a second each; `test_report` and commands in processes draw pages."""
    if request.path.name != "test_report.py" and "with_pictures" not in request.fixturenames:
        monkeypatch.setattr("bertjax.reporting.page.write_page", lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def products_of_float32():
    """Sets dtype "auto" to float32 on any processor; tests of bfloat16 set the dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertjax.distributed.mesh.cpu_dtype", lambda: "float32")
        yield


@pytest.fixture(autouse=True, scope="session")
def reader_without_tensorflow():
    """Sets the reader of records to the reader that starts faster.

    `tests/data/test_readers.py` compares both readers. Commands in a fresh Python read with TensorFlow.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertjax.data.loading.pipeline.reader", lambda: plain)
        yield


@contextlib.contextmanager
def without_compilation_cache():
    """Programs compiled for an absent TPU can be written to the cache, but not be read."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture
def with_pictures():
    """Runs of this test draw their pages."""


@pytest.fixture(scope="session")
def built_once(tmp_path_factory):
    """Returns `built_once(name, build)`, which returns a folder of this run of pytest.

    The first worker that needs the folder fills the folder by `build(folder)`; all workers read the folder, and no test
    writes to the folder.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, build: Callable[[pathlib.Path], object]) -> pathlib.Path:
        folder, unfinished = base / "built-once" / name, base / "unfinished" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{folder}.lock"):
            if not folder.exists():
                shutil.rmtree(unfinished, ignore_errors=True)  # a previous build failed
                unfinished.mkdir(parents=True)
                build(unfinished)
                unfinished.rename(folder)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def corpus_file(built_once):
    return built_once("corpus", lambda folder: (folder / "text.txt").write_text(make_corpus(80))) / "text.txt"


def tiny_config(corpus="", records=""):
    """Two short stages of a model that compiles in seconds."""
    config = pretraining_config()
    config.data.update(corpus=str(corpus), records=str(records), heldout_fraction=0.15, dupe_factor=3)
    config.model.update(
        vocab_size=150,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    config.stages = named_stages(short=stage(6, 32, 5), long=stage(4, 64, 10))
    config.batch_size, config.dtype = 16, "float32"  # also in processes that tests start
    config.unroll = "no"
    config.optimizer.update(learning_rate=3e-3, warmup_steps=2)
    config.log_every_steps = 2
    config.eval.update(every_steps=5, max_sequences=40, fill_masks=("the [MASK] saw the [MASK] .",))
    config.checkpoint.every_steps = 5
    return config


@contextlib.contextmanager
def preparing_in_process():
    """`prepare` without subprocesses, which take seconds to start."""
    from bertjax.data.preprocessing import preparation, vocabulary

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "worker_pool", in_process_pool)
        patch.setattr(vocabulary, "worker_pool", in_process_pool)
        yield


@pytest.fixture
def in_process():
    with preparing_in_process():
        yield


@pytest.fixture(scope="session")
def records_folder(corpus_file, built_once):
    """Records of `tiny_config`."""
    from bertjax.data.preprocessing.preparation import prepare

    def build(folder):
        with preparing_in_process():
            prepare(tiny_config(corpus_file), folder)

    return built_once("records", build)


@pytest.fixture(scope="session")
def pretrained(corpus_file, built_once):
    """Returns `pretrained(name)`: the workdir of a run of ten steps with the config `tests.curves.configs()[name]`."""
    from bertjax.launch.start import launch
    from tests.curves import configs

    def build(name, folder):
        config = configs()[name]
        config.data.corpus = str(corpus_file)
        for stage_fields in config.stages.values():
            stage_fields.steps = 10 // len(config.stages)
        with preparing_in_process():
            launch(config, folder)

    return lambda name: built_once(f"pretrained-{name}", functools.partial(build, name))


def one_device_mesh(config):
    return make_mesh(config, jax.devices()[:1])


def heldout_batches(files, *sizes, **settings):
    """Yields batches with all arrays of held-out records, see `pipeline.heldout_batches`."""
    from bertjax.data.batch import record_arrays
    from bertjax.data.loading import pipeline

    return pipeline.heldout_batches(files, record_arrays(files.masking), *sizes, **settings)


def pretraining_task(config, mesh, records=None, tokenizer=None, rows=None):
    """Returns the pre-training task on a folder of records, or without data."""
    from bertjax.pretraining.data import load_stages, planned_stages
    from bertjax.pretraining.task import Pretraining

    without = records is None
    data = planned_stages(config, mesh, rows) if without else load_stages(config, mesh, records, tokenizer=tokenizer)
    return Pretraining(config, mesh, data, tokenizer)


def launch_and_stop(task_class, config, workdir, step: int) -> None:
    """Launches a run that Ctrl-C stops before the batch of `step`."""
    from bertjax.launch.start import launch

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

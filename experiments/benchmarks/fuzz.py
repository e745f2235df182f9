"""Damaged and invented input at every door. Each input must give a result or a `UserError` of one line.

Command:  python -m experiments.benchmarks.fuzz --inputs=10000
Measures: outcomes by door (a kind of file, a folder, texts, overrides). Files of a good folder are torn, flipped, cut,
          mixed, or a value of their JSON is replaced; then the reading code runs. Inputs run in separate processes, so
          crashes, a minute without an answer, and a gigabyte of additional memory are counted
Results:  RESULTS.md
"""

import collections
import dataclasses
import gzip
import json
import lzma
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable

from absl import flags
from hypothesis import HealthCheck, Phase, given, settings, strategies
from hypothesis import seed as seeded

from bertjax.cli.app import run_command

INPUTS = flags.DEFINE_integer("inputs", 10_000, "Number of inputs of all doors together.")
DOORS = flags.DEFINE_list("doors", [], "Names of doors; by default all.")
SEED = flags.DEFINE_integer("seed", 0, "Of the damage.")

SECONDS = 60  # for an input
MEMORY = 1 << 30  # maximum additional bytes for an input
WORDS = "ship sail harbour wave captain bread oven butter judge witness verdict rose spade hedge".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ODD = [
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 10**30, -0.5, 0.5, 1e308, float("nan"), float("inf"),
    "", "x", "../x", "/etc/passwd", "\0", "\u2028", "é" * 300,
    [], {}, [[]], [0], [None], ["x"], {"x": 1}, {"": {}},
]  # fmt: skip
ODD_VALUES = (
    "1e99", "-1e-300", "nan", "1,2", "(1, 2)", "['a']", "paper", "seed=0,1", "auto", "full", "8", "64", "1e-4",
    "x" * 3000, "$(x)", "{}", "lambda: 0", "9" * 5000,
)  # fmt: skip
LONE, DEEP = '"\ud800"', "[" * 100_000  # invalid JSON that `json` writes and reads


@dataclasses.dataclass(frozen=True)
class Door:
    """A place where input enters the package.

    Attributes:
      make: writes good input to a folder.
      enter: uses the content of such a folder, which may be damaged.
      files: glob of the files to damage; empty: `enter` also takes the random generator, and invents its input.
    """

    make: Callable
    enter: Callable
    files: str = "**/*"


# Damage.


def damage(path: pathlib.Path, others: list[pathlib.Path], rng: random.Random) -> str:
    """Damages a file, and returns a description of the damage."""
    content = path.read_bytes()
    is_json = path.suffix in (".json", ".jsonl")
    kinds = [replace_value] * 6 * is_json + [flip, cut, tear, repeat, insert, zero, delete, empty, mix]
    kind = rng.choice(kinds)
    changed = kind(content, rng, others)
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    return f"{kind.__name__} {path.name}"


def flip(content, rng, others):
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 16)) if content else 0):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def cut(content, rng, others):
    return content[: rng.randrange(len(content) + 1)]


def tear(content, rng, others):
    first, last = _range(content, rng)
    return content[:first] + content[last:]


def repeat(content, rng, others):
    first, last = _range(content, rng)
    return content[:last] + content[first:]


def insert(content, rng, others):
    first, _ = _range(content, rng)
    return content[:first] + rng.randbytes(rng.choice((1, 4, 100))) + content[first:]


def zero(content, rng, others):
    first, last = _range(content, rng)
    return content[:first] + bytes(last - first) + content[last:]


def mix(content, rng, others):
    other = rng.choice(others).read_bytes()
    return content[: rng.randrange(len(content) + 1)] + other[rng.randrange(len(other) + 1) :]


def delete(content, rng, others):
    return None


def empty(content, rng, others):
    return b""


def _range(content, rng):
    first = rng.randrange(len(content) + 1)
    return first, min(len(content), first + rng.choice((1, 8, 200, 10_000)))


def replace_value(content, rng, others):
    """Replaces a value of a JSON document, or of a line of JSON, removes it, or adds one."""
    lines = content.decode().split("\n")
    number = rng.randrange(len(lines)) if not content.startswith(b"{\n") else None
    document = json.loads(content if number is None else lines[number] or "{}")
    places = list(_places(document))
    value = rng.choice(ODD)
    if places:
        holder, key = rng.choice(places)
        if rng.random() < 0.15 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = value
    else:
        document = value
    text = json.dumps(document)
    if rng.random() < 0.1:
        text = text.replace(json.dumps(value), rng.choice((LONE.encode("unicode-escape").decode(), DEEP)), 1)
    if number is None:
        return text.encode()
    return "\n".join([*lines[:number], text, *lines[number + 1 :]]).encode()


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


# Doors.


def tiny_config():
    from bertjax.config.defaults import named_stages, pretraining_config, stage

    config = pretraining_config()
    config.data.update(heldout_fraction=0.2, dupe_factor=2)
    config.model.update(vocab_size=len(pieces()), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=64)  # fmt: skip
    config.stages = named_stages(only=stage(2, 32, 5))
    config.batch_size = 8
    config.optimizer.warmup_steps = 0
    config.eval.update(every_steps=2, max_sequences=8, fill_masks=())
    return config


def text(documents: int = 40) -> str:
    rng = random.Random(0)
    lines = [[" ".join(rng.choices(WORDS, k=8)).capitalize() + "." for _ in range(6)] for _ in range(documents)]
    return "\n\n".join(map("\n".join, lines)) + "\n"


def pieces() -> list[str]:
    from bertjax.text.tokenizer import SPECIAL_TOKENS

    return [*SPECIAL_TOKENS, *WORDS, *LETTERS, *("##" + x for x in LETTERS), *".,:?!"]


def wordpiece():
    from bertjax.text.tokenizer import WordPiece

    return WordPiece(pieces(), lowercase=True)


def make_records(folder):
    from bertjax.data.preprocessing.preparation import prepare

    corpus, config = folder / "text.txt", tiny_config()
    corpus.write_text(text())
    wordpiece().save(folder)
    config.tokenizer.path, config.data.corpus = str(folder / "vocab.txt"), str(corpus)
    prepare(config, folder / "records")


def train_on_records(folder):
    """Runs the first part of `bertjax.main`, until the first steps."""
    from bertjax.pretraining.records import find_or_prepare

    config = tiny_config()
    config.data.records = str(folder / "records")
    records, _ = find_or_prepare(config, folder)
    read_batches(records, vocab_size=None)


def read_batches(records, vocab_size):
    from bertjax.data.batch import RECORD_ARRAYS, RowSize, record_arrays
    from bertjax.data.loading.order import Order
    from bertjax.data.loading.pipeline import heldout_batches, train_batches
    from bertjax.data.records.record_sets import find_records

    found = find_records(records, 32, 5, "train", vocab_size, measures=True)
    batches = train_batches(Order(found, 8, 0, RowSize(32, 5, 4)), RECORD_ARRAYS, 5)
    for _ in range(found.total // 8 + 2):
        next(batches)
    if heldout := find_records(records, 32, 5, "heldout", vocab_size):
        list(heldout_batches(heldout, record_arrays(heldout.masking), 32, 5, batch_size=8, max_sequences=20))


def make_google_records(folder):
    make_records(folder)
    for path in sorted((folder / "records").rglob("*")):
        if path.suffix != ".tfrecord":
            path.is_dir() or path.unlink()


def read_google_records(folder):
    read_batches(folder / "records", vocab_size=len(pieces()))


def make_checkpoint(folder, to="bertjax"):
    """Writes a fine-tuned checkpoint with all optional parts."""
    from bertjax.interop import conversion, huggingface

    source = folder if to == "huggingface" else folder / "source"
    huggingface.write(
        source,
        _bert_config(),
        fine_tuned_params(),
        wordpiece(),
        "BertForSequenceClassification",
        huggingface.Metadata(("bad", "fair", "good")),
    )
    if to != "huggingface":
        conversion.convert(source, folder / "made", to)
        shutil.rmtree(source)


def fine_tuned_params():
    import numpy as np

    from bertjax.models.bert.tf1_names import to_params, variable_table

    config, rng = _bert_config(), np.random.default_rng(0)
    table = variable_table(config, {"pooler": 0, "masked_lm": 0, "next_sentence": 0, "classifier": 3})
    shapes = {name: tensor.tensor_shape for tensor in table.values() for name in tensor.names}
    variables = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    return to_params(variables, config, "fuzz")


def _bert_config():
    from bertjax.config.model_config import BertConfig

    return BertConfig(vocab_size=len(pieces()), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                      intermediate_size=32, max_position_embeddings=64)  # fmt: skip


def make_sharded(folder):
    """Writes a Hugging Face folder with weights in two files."""
    import safetensors.numpy

    make_checkpoint(folder, "huggingface")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def make_tf1(folder):
    make_checkpoint(folder, "tf1")


def convert(folder):
    """Runs `bertjax.convert`, which uses all read values."""
    import numpy as np

    from bertjax.interop import conversion, pretrained

    source = folder / "made" if (folder / "made").is_dir() else folder
    found = pretrained.read_pretrained(source)
    if found.format == "bertjax":  # this format has checksums
        ours, theirs = pretrained.flattened(found.params), pretrained.flattened(fine_tuned_params())
        assert ours.keys() == {name for name in theirs if name.startswith(("bert/", "classifier/"))}
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours), "values that were not saved"
    if found.tokenizer is not None:
        found.tokenizer.encode("the captain saw a Bread oven.")
    conversion.convert(source, folder.parent / "converted", "huggingface" if found.format == "bertjax" else "bertjax")


def make_replaced(folder):
    """Writes a workdir of a run with the objective of replaced words, with random params."""
    import flax.linen as nn
    import jax
    import numpy as np

    from bertjax.distributed.mesh import make_mesh
    from bertjax.objectives.parsing import learn
    from bertjax.pretraining.data import planned_stages
    from bertjax.pretraining.task import Pretraining
    from bertjax.training.checkpoints import checkpoint, workdir

    config, rng = tiny_config(), np.random.default_rng(0)
    learn(config, "50*replaced + generator", generator=dict(width=0.5, embeddings="disentangled"))
    mesh = make_mesh(config, jax.devices()[:1])
    task = Pretraining(config, mesh, planned_stages(config, mesh))
    shapes = nn.meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
    checkpoint.write_params(folder / "made", jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes))
    workdir.write_info(folder / "made", workdir.RunInfo(config), wordpiece())


def convert_both(folder):
    """Runs `bertjax.convert` for the model and for its generator."""
    from bertjax.interop import conversion

    for part in ("", "generator"):
        conversion.convert(folder / "made", folder.parent / f"converted {part}", "huggingface", part=part)


def make_run(folder):
    """Writes a workdir of pre-training with two checkpoints."""
    from bertjax.launch.start import launch

    make_records(folder)
    config = tiny_config()
    config.data.records = str(folder / "records")
    config.checkpoint.every_steps = 1
    launch(config, folder / "run")


def resume(folder):
    """Runs `bertjax.main`."""
    from bertjax.launch.start import launch
    from bertjax.reporting.page import draw

    config = tiny_config()
    config.data.records = str(folder / "records")
    config.checkpoint.every_steps = 1
    launch(config, folder / "run", draw=draw)


def make_search(folder):
    """Writes the folder of a sweep with two finished trials."""
    from bertjax.training.checkpoints.checkpoint import write_scores
    from bertjax.training.scores import Scores

    for trial, score in (("seed=0", 0.5), ("seed=1", 0.75)):
        make_checkpoint(folder / trial)
        (folder / "runs").mkdir(exist_ok=True)
        (folder / trial / "made").rename(folder / "runs" / trial)
        (folder / trial).rmdir()
        write_scores(folder / "runs" / trial, 0, Scores({"accuracy": score}, score))
        (folder / "runs" / trial / "result.json").write_text(
            json.dumps({"scores": {"accuracy": score}, "failed": False}) + "\n"
        )
    (folder / "best").write_text("runs/seed=1\n")


def use_search(folder):
    from etils import epath

    from bertjax.finetuning import sweep
    from bertjax.interop import pretrained

    pretrained.read_pretrained(folder)
    sweep.keep_best(epath.Path(folder), "accuracy")


def make_tokenizers(folder):
    from bertjax.text import vocabulary_learning

    wordpiece().save(folder)
    (folder / "tokenizer.json").write_text(wordpiece().to_huggingface())
    vocabulary_learning.learn_new_vocabulary(
        "sentencepiece", vocabulary_learning.count_words("sentencepiece", text().splitlines()), 40
    ).save(folder)


def tokenize(folder):
    from bertjax.common.errors import UserError
    from bertjax.text import tokenizer

    last = None
    for kind, name in (
        ("wordpiece", "vocab.txt"),
        ("wordpiece", "tokenizer.json"),
        ("sentencepiece", "tokenizer.model"),
    ):
        try:
            found = tokenizer.load_tokenizer(kind, folder / name)
            encoding = found.encode("The captain's bread, éa 東京 \U0001f600\0 x")
            assert all(0 <= i < found.vocab_size for i in encoding.ids)
            found.decode(encoding.ids)
            found.encode_flat(["a", "captain"])
            found.continues_word.sum()
            found.save(folder.parent / "saved")
            found.to_huggingface()
        except UserError as error:
            last = error
    if last:
        raise last


def make_texts(folder):
    import pyarrow
    import zstandard
    from pyarrow import parquet

    content = text().encode()
    lines = "".join(json.dumps({"text": part}) + "\n" for part in text().split("\n\n")).encode()
    for name, data in (
        ("a.txt", content), ("b.jsonl", lines),
        ("c.txt.gz", gzip.compress(content)), ("d.txt.xz", lzma.compress(content)),
        ("e.jsonl.zst", zstandard.compress(lines)), ("f.txt.gz", gzip.compress(content[:900]) + gzip.compress(content)),
    ):  # fmt: skip
        (folder / name).write_bytes(data)
    parquet.write_table(pyarrow.table({"text": text().split("\n\n")}), folder / "g.parquet")


def read_texts(folder):
    from bertjax.common.errors import UserError
    from bertjax.data.corpus.corpus import read_documents

    last = None
    for path in sorted(folder.iterdir()):
        try:
            for document in read_documents([str(path)]):
                "\n".join(document.lines).encode()
        except UserError as error:
            last = error
    if last:
        raise last


def make_tables(folder):
    """Writes valid data of every fine-tuning task that reads files."""
    rng = random.Random(0)
    sentences = [" ".join(rng.choices(WORDS, k=5)) for _ in range(12)]
    rows = [{"text": sentence, "label": str(i % 2)} for i, sentence in enumerate(sentences)]
    for name in ("train", "dev"):
        for suffix, content in (
            ("csv", "text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\n' for row in rows)),
            ("tsv", "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows)),
            ("jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        ):
            (folder / f"classify-{suffix}").mkdir(exist_ok=True)
            (folder / f"classify-{suffix}" / f"{name}.{suffix}").write_text(content)
        tagged = "".join(
            json.dumps({"words": s.split(), "tags": ["O", "B-X", "I-X", "O", "O"]}) + "\n" for s in sentences
        )
        _write(folder / "tag" / f"{name}.jsonl", tagged)
        conll = "-DOCSTART- -X- O O\n\n" + "\n\n".join("\n".join(f"{w} NN I O" for w in s.split()) for s in sentences)
        _write(folder / "ner" / f"{name}.txt", conll + "\n")
        glue = "sentence\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows)
        _write(folder / "glue" / "SST-2" / f"{name}.tsv", glue)
        asked = [
            {"context": s, "qas": [{"id": f"q{i}", "question": "what?", "is_impossible": False,
             "answers": [{"text": s.split()[0], "answer_start": 0}]}]} for i, s in enumerate(sentences)
        ]  # fmt: skip
        _write(folder / "squad" / f"{name}-v1.1.json", json.dumps({"data": [{"paragraphs": asked}]}))
    header = "video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label"
    for name in ("train", "val"):
        lines = [f"v,{i},s,{s},the,gold,{s},a ship,a wave,bread,{i % 4}" for i, s in enumerate(sentences)]
        _write(folder / "swag" / f"{name}.csv", "\n".join([header, *lines]) + "\n")


def _write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def load_tables(folder):
    from bertjax.common.errors import UserError
    from bertjax.config import experiments
    from bertjax.inference import tasks
    from bertjax.launch.validate import validate

    last = None
    for case in sorted(folder.iterdir()):
        task = case.name.partition("-")[0]
        config = experiments.load({"glue": "glue:sst2", "squad": "squad:v1.1"}.get(task, task))
        config.data.path, config.max_seq_length = str(case), 128
        config.init_checkpoint = "x"
        try:
            validate(config)
            tasks.get(config.task).load(config, wordpiece())
        except UserError as error:
            last = error
    if last:
        raise last


def nothing(folder):
    (folder / "nothing").touch()


def override(folder, rng):
    """Applies random overrides to an experiment of pre-training or fine-tuning."""
    from bertjax.cli.overrides import from_arguments
    from bertjax.config import experiments
    from bertjax.launch.validate import validate

    if rng is None:
        return
    name = rng.choice([*experiments.shipped(), "small:mini", "glue:mrpc", "squad:v2.0"])
    config = experiments.load(name)
    fields = list(_fields(config, "config"))
    arguments = [f"--config={name}"]
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        field = rng.choice(fields)
        value = rng.choice((*map(str, ODD), *ODD_VALUES))
        value = rng.choice((value, _value(config, field)))
        if rng.random() < 0.1:
            field = field[: rng.randrange(1, len(field))]
        arguments.append(f"--{field}={value}" if rng.random() < 0.9 else f"--no{field}")
    config, _ = from_arguments(arguments)
    validate(config, with_data=rng.random() < 0.5)
    if config.get("sweep"):
        from bertjax.finetuning import sweep

        sweep.trials(config)


def _value(config, field):
    for name in field.split(".")[1:]:
        config = config[name]
    return str(config)


def _fields(config, prefix):
    for name, value in config.items():
        if hasattr(value, "items"):
            yield from _fields(value, f"{prefix}.{name}")
        yield f"{prefix}.{name}"


def made_up_text(folder, rng):
    """Passes random characters through all steps of text processing."""
    import numpy as np

    from bertjax.data.corpus.reading import Document
    from bertjax.data.corpus.sentences import split

    known = wordpiece()

    @seeded(rng.randrange(2**32) if rng else 0)
    @settings(
        max_examples=5, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(strategies.text(max_size=300), strategies.sampled_from(("en", "de", "zh", "ja", "ar", "hi")))
    def enters(content, language):
        lines = [line for line in content.splitlines() if line.strip()]
        for sentence in split(Document("x:1", lines), language):
            assert sentence.strip()
        encoding = known.encode(content)
        ids, sizes = known.encode_flat([content])
        assert np.array_equal(ids, encoding.ids) and sizes.sum() == len(encoding.ids)
        assert all(0 <= a <= b <= len(content) for a, b in encoding.offsets)
        known.decode(encoding.ids)

    enters()


ALL = {
    "manifest": Door(make_records, train_on_records, "records/manifest.json"),
    "records": Door(make_records, train_on_records, "records/**/*"),
    "google records": Door(make_google_records, read_google_records, "records/**/*.tfrecord"),
    "converted workdir": Door(make_checkpoint, convert),
    "workdir's config": Door(make_checkpoint, convert, "made/config.json"),
    "two models' config": Door(make_replaced, convert_both, "made/config.json"),
    "resumed workdir": Door(make_run, resume, "run/**/*"),
    "search": Door(make_search, use_search),
    "Hugging Face": Door(lambda folder: make_checkpoint(folder, "huggingface"), convert),
    "Hugging Face's JSON": Door(make_sharded, convert, "*.json"),
    "TF1": Door(make_tf1, convert),
    "tokenizers": Door(make_tokenizers, tokenize),
    "texts": Door(make_texts, read_texts),
    "tables": Door(make_tables, load_tables),
    "overrides": Door(nothing, override, ""),
    "made-up text": Door(nothing, made_up_text, ""),
}


# Inputs run one after another, in a separate process.


def pass_through(name: str, folder: pathlib.Path, seed: int, number: int) -> tuple[str, str]:
    """Returns the outcome of an input ("result", "UserError" or an error), and its damage with the exception."""
    import jax

    from bertjax.common.errors import UserError

    door, rng = ALL[name], random.Random(f"{name} {seed} {number}")
    made_up = rng if number else None
    place = pathlib.Path(tempfile.mkdtemp(prefix="fuzz-"))
    copy = place / "input"
    shutil.copytree(folder / name, copy, symlinks=True)
    what = "made up" if number else "undamaged"
    if door.files and number:
        files = sorted(path for path in copy.glob(door.files) if path.is_file())
        chosen = files[rng.randrange(len(files))]
        others = sorted(path for path in copy.rglob("*") if path.is_file())
        what = damage(chosen, others, rng)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        door.enter(copy) if door.files else door.enter(copy, made_up)
        ended, said = "result", ""
    except UserError as error:
        ended, said = ("UserError" if str(error).count("\n") == 0 else "several lines"), str(error)
    except OSError as error:  # the commands also print one line for an `OSError` that names the file
        ended, said = ("UserError" if error.filename else "escape"), traceback.format_exc()
    except (Exception, SystemExit):  # any other exception is a bug
        ended, said = "escape", traceback.format_exc()
    finally:
        shutil.rmtree(place)
        jax.clear_caches() if number % 50 == 0 else None
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 > MEMORY:
        ended, said = "memory", what
    return ended, f"{what}: {said}"


def make_all(names, folder: pathlib.Path) -> None:
    """Writes valid input for each door to `FOLDER/NAME`."""
    made = {}
    for name in names:
        make = ALL[name].make
        if make in made:
            shutil.copytree(made[make], folder / name)
        else:
            (folder / name).mkdir()
            make(folder / name)
        made.setdefault(make, folder / name)


def _work(connection, folder, seed):
    import warnings

    warnings.simplefilter("ignore")
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1), os.dup2(sink, 2)
    while True:
        name, number = connection.recv()
        connection.send(pass_through(name, folder, seed, number))


def fuzz(names, inputs: int, seed: int, folder: pathlib.Path, show=print) -> dict[str, collections.Counter]:
    """Passes `inputs` inputs through the doors, shows the errors, and returns {door: {outcome: count}}."""
    found = {name: collections.Counter() for name in names}
    make_all(names, folder)
    context = multiprocessing.get_context("spawn")
    process = connection = None
    for number in range(inputs):
        name = names[number % len(names)]
        if process is None:
            connection, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, folder, seed), daemon=True)
            process.start()
            theirs.close()
            is_fresh = True
        connection.send((name, number // len(names)))
        try:
            ended, said = connection.recv() if connection.poll(SECONDS + 60 * is_fresh) else ("hang", "")
        except EOFError:
            ended, said = "crash", ""
        is_fresh = False
        found[name][ended] += 1
        if ended not in ("result", "UserError") or (ended != "result" and said.startswith("undamaged")):
            show(f"--- {name} {number // len(names)}: {ended}\n{said}", flush=True)
        if ended in ("hang", "crash", "memory"):
            process.kill()
            process = None
    if process is not None:
        process.kill()
    return found


def main(_):
    names, began = DOORS.value or list(ALL), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(names, INPUTS.value, SEED.value, pathlib.Path(folder))
    ways = sorted({way for counts in found.values() for way in counts}, key=lambda way: (way != "result", way))
    print("| door | inputs | " + " | ".join(ways) + " |\n|" + "---|" * (len(ways) + 2))
    for name, counts in [*found.items(), ("all", sum(found.values(), collections.Counter()))]:
        print(f"| {name} | {counts.total()} | " + " | ".join(str(counts[way]) for way in ways) + " |")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    run_command(main)

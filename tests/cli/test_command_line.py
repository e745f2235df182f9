"""The command line: subcommands, experiments by name, and error messages for a mistaken --config."""

import gzip
import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bertjax import __version__
from bertjax.cli import commands
from bertjax.cli.overrides import from_arguments
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.data.corpus.text_input import TextInput, read_text_lines
from bertjax.launch.overrides import find_field
from experiments.benchmarks import installs
from tests.processes import ROOT

MINE = """
import ml_collections
from ml_collections import ConfigDict, config_dict

def get_config(kind="plain"):
    stage = dict(steps=10, length=32)
    return ConfigDict(dict(
        kind=kind,
        batch_size=256,
        listed=(ConfigDict(stage), ConfigDict(stage)),
        named=dict(short=stage, long=stage),
        data=dict(fraction=0.005, lower=True, corpus=config_dict.placeholder(object), path=""),
        texts=("a [MASK] .",),
    ))
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Makes a folder with the experiment mine.py, and makes it the current folder."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(*arguments):
    return from_arguments(["bertjax", *arguments])


@pytest.mark.parametrize("arguments, path, value", [
    (["--config.batch_size=8"], "batch_size", 8),
    (["--config.batch_size", "8"], "batch_size", 8),
    (["-config.batch_size=8"], "batch_size", 8),
    (["--config.batch_size=8", "--config.batch_size=16"], "batch_size", 16),
    (["--config.listed[1].steps=5"], "listed[1].steps", 5),
    (["--config.listed[-1].steps=5"], "listed[1].steps", 5),
    (["--config.named.long.steps=5"], "named.long.steps", 5),
    (['--config.named["long"].steps=5'], "named.long.steps", 5),
    (["--config.data.fraction=2e-3"], "data.fraction", 0.002),
    (["--config.data.fraction=1"], "data.fraction", 1.0),
    (["--config.data.fraction=1/200"], "data.fraction", 0.005),
    (["--config.data.lower=false"], "data.lower", False),
    (["--noconfig.data.lower"], "data.lower", False),
    (["--noconfig.data.lower", "--config.data.lower"], "data.lower", True),
    (["--config.data.path=a=b, c"], "data.path", "a=b, c"),
    (["--config.data.path="], "data.path", ""),
    (["--config.data.corpus=text/"], "data.corpus", "text/"),
    (["--config.data.corpus=['a', 'b']"], "data.corpus", ["a", "b"]),
    (["--config.texts=('a', 'b [MASK]')"], "texts", ("a", "b [MASK]")),
    (["--config.texts=it's a [MASK] , (or not)"], "texts", ("it's a [MASK] , (or not)",)),
    (["--config.texts=[MASK] a", "--config.texts=b"], "texts", ("[MASK] a", "b")),
])  # fmt: skip
def test_an_override_has_the_type_of_the_field(mine, arguments, path, value):
    for order in (["--config=mine.py", *arguments], [*arguments, "--config", "mine.py"]):
        config, rest = parse(*order, "text", "--", "--config.batch_size=many")
        field = find_field(config, path)
        assert field.value == value and type(field.value) is type(value)
        assert "--config=mine.py" in rest or rest[1:3] == ["--config", "mine.py"]
        assert rest[-3:] == ["text", "--", "--config.batch_size=many"]
        assert config.is_locked


OF_DATA = "config.data is a section: set one of its fields, corpus, fraction, lower, path"
FIELDS = "there are batch_size, data, kind, listed, named, texts"
LISTED = "config.listed has 2 entries: config.listed[0] to config.listed[1]"
NO_NAME = "must name a field, as in --config.model.vocab_size=8000"
WRONG = [
    ("--config.batch_size=many", "must be a whole number (int)"),
    ("--config.batch_size=None", "must be a whole number (int)"),
    ("--config.batch_size=1e3", "must be a whole number (int); write 1000"),
    ("--config.batch_size", "the value is missing; write --config.batch_size=VALUE, such as --config.batch_size=256"),
    ("--config.data.fraction=", "must be a number (float), such as 0.005, 1e-4 or 1/200"),
    ("--config.data.fraction=1/0", "must be a number (float), such as 0.005, 1e-4 or 1/200"),
    ("--config.data.lower=maybe", "must be True or False"),
    ("--noconfig.batch_size", "the prefix no is for fields with True or False; write --config.batch_size=VALUE"),
    ("--config.texts=3", """must be a tuple of str; write --config.texts="('a [MASK] .',)\""""),
    ("--config.texts=('a'", """must be a tuple; write --config.texts="('a [MASK] .',)\""""),
    ("--config.texts[0]=a", "set all of config.texts at once"),
    ("--config.data=3", OF_DATA),
    ("--config.data", OF_DATA),
    ("--config.listed=3", "config.listed has sections: set a field of one, config.listed[0].FIELD: length, steps"),
    ("--config.batch_size.x=3", "config.batch_size has no fields: it is the value 256"),
    ("--config.epochs=3", f"config has no field 'epochs'; {FIELDS}"),
    ("--config.keys=3", f"config has no field 'keys'; {FIELDS}"),
    ("--config.batchsize=3", "config has no field 'batchsize'; did you mean batch_size? There are also data, kind, "
     "listed, named, texts"),
    ("--config.named.medium.steps=3", "config.named has no field 'medium'; there are long, short"),
    ("--config.named[0].steps=3", "config.named has no field 0; there are long, short"),
    ("--config.listed[2].steps=3", f"there is no config.listed[2]; {LISTED}"),
    ("--config.listed.short.steps=3", f"there is no config.listed['short']; {LISTED}"),
    ("--config.listed[:].steps=3", NO_NAME),
    ("--config.a b=3", NO_NAME),
]  # fmt: skip


@pytest.mark.parametrize("argument, reason", WRONG)
def test_a_wrong_override_is_shown_with_valid_values(mine, argument, reason):
    with pytest.raises(UserError) as error:
        parse("--config=mine.py", "--config.kind=x", argument, "--workdir=x")
    assert str(error.value) == f"{argument}: {reason}"


def test_an_error_shows_a_flag_and_its_separate_value(mine):
    with pytest.raises(UserError, match=r"^--config.batch_size many: must be a whole number"):
        parse("--config=mine.py", "--config.batch_size", "many")


NOTHING = "():\n    pass\n"
FILES = {
    "broken.py": ("import os\ndef get_config(:\n", "not Python: line 2: invalid syntax"),
    "empty.py": ("x = 1\n", "has no function get_config(); define the function in the file"),
    "raises.py": ("def get_config():\n    return 1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
    "imports.py": ("x = 1\nimport nosuchmodule\n", "line 2: ModuleNotFoundError: No module named 'nosuchmodule'"),
    "none.py": ("def get_config" + NOTHING, "get_config() returns None instead of a ConfigDict, such as "
                "pretraining_config()"),
    "plain.py:x": ("def get_config" + NOTHING, "get_config() does not accept 'x' after a colon"),
    "sizes.py": ("def get_config(size):\n    pass\n", "get_config(size) needs an argument after a colon"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_a_config_is_named_with_the_line(name, tmp_path, monkeypatch):
    content, reason = FILES[name]
    (tmp_path / name.partition(":")[0]).write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        parse(f"--config={name}", "--config.batch_size=8")
    assert str(error.value) == f"--config={name}: {reason}"


@pytest.mark.parametrize("arguments", [[], ["--config="], ["--config"], ["--config", "--workdir=x"], ["--config.x=3"]])
def test_a_missing_experiment_lists_the_experiments(arguments):
    known = r"^--config: name an experiment \(adapt, base, .*, tag, .*\) or the path of a Python file"
    with pytest.raises(UserError, match=known):
        parse(*arguments)


def test_a_run_is_named_after_its_experiment():
    names = [experiments.name(e) for e in ("glue:mrpc", "experiments/glue.py:mrpc", "base", "a.b/my.v2.py")]
    assert names == ["glue-mrpc", "glue-mrpc", "base", "my.v2"]


def test_experiments_are_found_by_name_and_a_file_wins(mine):
    config, _ = parse("--config=glue:rte")
    assert (config.task, config.data.name) == ("glue", "rte")
    for path in (ROOT / "experiments").glob("*.py"):
        assert experiments.load(path.stem) == experiments.load(str(path))
    (mine / "base").write_text(MINE)
    assert parse("--config=base:own")[0].kind == "own"
    (mine / "quick").mkdir()
    assert parse("--config=experiments/glue.py:rte")[0] == config, "no folder experiments"
    (mine / "experiments").mkdir()
    (mine / "experiments/glue.py").write_text(MINE)
    assert parse("--config=experiments/glue.py:own")[0].kind == "own"
    for name, reason in (
        ("experiments/ner2.py", r"no such file, .* did you mean ner\? "),
        ("other/ner.py", r"no such file, .* did you mean ner\? "),
        ("quick", "the path is a folder, and no experiment of this name; there are adapt, base, "),
        ("ner2", r"no such file, .* did you mean ner\? There are also adapt, base, "),
    ):
        with pytest.raises(UserError, match=f"^--config={name}: {reason}"):
            parse(f"--config={name}")


def command(*arguments, cwd, **environment):
    """Runs `bertjax` in another process; `environment` must contain the path of the package unless it is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    return subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_an_experiment_imports_modules_of_its_folder(tmp_path):
    """The experiment file defines a task. The command runs in any folder and leaves `sys.path` unchanged."""
    (tmp_path / "neighbour.py").write_text("SIZE = 7\n")
    (tmp_path / "own.py").write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom bertjax.config import pretraining_config\n"
        "from neighbour import SIZE\n\n@dataclasses.dataclass\nclass Own:\n    size: int = SIZE\n\n"
        "def get_config():\n    config = pretraining_config()\n    config.batch_size = Own().size\n    return config\n"
    )
    before = list(sys.path)
    assert parse(f"--config={tmp_path / 'own.py'}")[0].batch_size == 7 and sys.path == before


def test_bertjax_lists_its_commands_and_imports_nothing_else(capsys, monkeypatch):
    program = "import sys; from bertjax import __main__; __main__.main(); print(*sys.modules, file=sys.stderr)"
    listed, version = (command(sys.executable, "-c", program, *more, cwd=ROOT) for more in ([], ["--version"]))
    assert [line.split()[0] for line in listed.stdout.splitlines() if line[:2] == "  "] == list(commands.COMMANDS)
    assert version.stdout == f"bertjax {__version__}\n"
    for result in (listed, version):
        assert not {"absl", "ml_collections", "numpy", "jax", "tensorflow"} & set(result.stderr.split())
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()

    monkeypatch.setattr(sys, "argv", ["bertjax", "trian"])
    with pytest.raises(SystemExit) as stop:
        commands.main()
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("error: bertjax has no command 'trian'; did you mean train? There are ")


@pytest.mark.slow
def test_a_wheel_has_the_command_and_the_experiments(tmp_path):
    """The wheel is built from the files that the Dockerfile copies."""
    source = tmp_path / "source"
    source.mkdir()
    for names in re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M):
        for name in names.replace("$DEVICE", "cpu").split():
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source], check=True)
    shutil.rmtree(source)

    # The environment contains the dependencies of bertjax; bertjax itself is only in the wheel.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = tmp_path.glob(f"bertjax-{__version__}-*.whl")
    subprocess.run([*pip, "--python", environment / "bin" / "python", "install", "--no-deps", wheel], check=True)

    empty = tmp_path / "empty"
    empty.mkdir()
    bertjax = environment / "bin" / "bertjax"
    refused = command(bertjax, "train", "--config=quickstart", "--config.batch_size=0", cwd=empty)
    assert (refused.returncode, refused.stderr) == (1, "error: config.batch_size = 0: must be at least 1\n")
    shown = command(bertjax, "compile", "--help", cwd=empty)
    assert shown.returncode == 0 and "--topology=" in shown.stdout and not shown.stderr
    for name in ("py.typed", "reporting/templates/report.html", "serving/templates/page.html"):
        assert (packages / "bertjax" / name).exists()
    names = {path.stem for path in (packages / "bertjax" / "experiments").iterdir()} - {"__pycache__"}
    assert names == {path.stem for path in (ROOT / "experiments").glob("*.py")}
    assert not list(empty.iterdir())


@pytest.mark.parametrize("device", ["cpu", "cuda", "tpu"])
def test_images_install_the_requirements(device):
    """If this fails, run docker/lock."""
    lock = dict(line.split("==") for line in (ROOT / "docker" / f"{device}.txt").read_text().splitlines())
    image = dict(python_version="3.12", python_full_version="3.12.0", sys_platform="linux", platform_machine="x86_64")
    extras = ["hub", "serve", *([] if device == "cpu" else [device])]
    required = [Requirement(text) for text in installs.requirements(extras)]  # installed packages may be older
    wanted = [requirement for requirement in required if not requirement.marker or requirement.marker.evaluate(image)]
    assert {"aiohttp", "flatbuffers", "tensorflow-cpu"} < {requirement.name for requirement in wanted} and len(
        wanted
    ) > 25
    for requirement in wanted:
        assert lock[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    parts = {name for name in lock if name.startswith("jax-cuda12") or name == "libtpu"}
    assert parts == {"cpu": set(), "cuda": {"jax-cuda12-plugin", "jax-cuda12-pjrt"}, "tpu": {"libtpu"}}[device]


def test_input_lines_are_read_or_refused(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\rthree \xe2\x80\xa8 it\n")
    assert list(read_text_lines(str(path))) == ["one", "", "two", "three \u2028 it"]
    path.write_bytes(b"")
    assert list(TextInput(path=str(path))) == list(TextInput()) == []
    for content, message in (
        (b"fine\ncaf\xe9\n", r"texts.txt:2 is not UTF-8 \(unexpected end of data at byte 3\)"),
        (gzip.compress(b"fine", mtime=0), "texts.txt is compressed; unpack it first"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            list(read_text_lines(str(path)))
    with pytest.raises(UserError, match=f"--input={tmp_path}: is a folder; name a file with one text per line"):
        list(read_text_lines(str(tmp_path)))


@pytest.mark.parametrize("arguments, sizes", [
    (["--config=base", "--config.model.hidden_size=128"], (128, 512, 2)),
    (["--config=modern:base", "--config.model.hidden_size=128"], (128, 192, 2)),
    (["--config=base", "--config.model.hidden_size=100"], (100, 400, 2)),  # 1.5 is not a number of heads
    (["--config=base", "--config.model.hidden_size=128", "--config.model.intermediate_size=99"], (128, 99, 2)),
    (["--config=base", "--config.model.num_attention_heads=6"], (768, 3072, 6)),
])  # fmt: skip
def test_the_sizes_of_layers_follow_the_width(arguments, sizes):
    model = parse(*arguments)[0].model
    assert (model.hidden_size, model.intermediate_size, model.num_attention_heads) == sizes

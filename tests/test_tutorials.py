"""The commands of the pages: tests run the tutorials in order with small models, and parse all other commands.

The errors in docs/faq.md equal the errors of the commands.
"""

import ast
import importlib.util
import re
import shlex
import types

import pytest

from bertjax.cli.commands import COMMANDS
from bertjax.cli.help import example_in
from bertjax.cli.overrides import from_arguments
from bertjax.config.defaults import fine_tuning_config, pretraining_config
from bertjax.inference.tasks import TASKS
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.objectives.registry import OBJECTIVES
from bertjax.training.optim import optimizers, schedules
from bertjax.training.trackers import trackers
from tests.checkpoints import checkpoint  # noqa: F401
from tests.pages import OTHERS, PAGES, ROOT, SITE, blocks_of, module_of, split_redirection
from tests.processes import run
from tests.reader import Reader, write_inputs

TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]
FAQ = ROOT / "docs" / "faq.md"
SAID = [block for block in blocks_of(FAQ) if "said by" in block.notes]
IN_CODE = [block for block in blocks_of(FAQ) if "in" in block.notes]  # needs other hardware, or a run


@pytest.fixture(scope="module")
def reference():
    """Imports docs/site/reference.py, which has the flags of each command."""
    spec = importlib.util.spec_from_file_location("reference", SITE / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def forgetting(monkeypatch):
    """Removes the registrations of the files of a page after the test."""
    kinds = (
        families.FAMILIES,
        OBJECTIVES,
        optimizers.OPTIMIZERS,
        schedules.SCHEDULES,
        trackers.TRACKERS,
        TASKS,
    )
    for kind in kinds:
        monkeypatch.setattr(kind, "registered", dict(kind.registered))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_pages_exists(page, reference, tmp_path, monkeypatch):
    """Commands have existing flags, and a valid config except for missing data."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "bertjax.training.trackers.trackers.validate", lambda config: None
    )  # packages of trackers may be missing
    for block in blocks_of(page):
        if "file" in block.notes:
            (tmp_path / block.notes["file"]).write_text(block.text)
        if block.language == "python":
            compile(block.text, page, "exec")
        for words in block.commands():
            if command := module_of(words):
                arguments, _ = split_redirection(command[1])
                _, flags = reference.flags_of(command[0])
                names = _given(flags, arguments)
                assert {flag.name for flag in flags if reference.is_required(flag)} <= names, words
            elif words[:2] == ["python", "-m"]:
                path = ROOT / words[2].replace(".", "/")
                assert path.is_dir() or path.with_suffix(".py").exists() or words[2] == "venv", words
            else:
                assert words[0] in OTHERS or (ROOT / words[0]).is_file(), words


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_has_the_required_flags(name, reference):
    docstring, flags = reference.flags_of(COMMANDS[name][0])
    program, command, *arguments = shlex.split(example_in(docstring))
    assert (program, command) == ("bertjax", name)
    assert {flag.name for flag in flags if reference.is_required(flag)} <= _given(flags, arguments)


def _given(flags, arguments):
    """Returns the names of the flags in the arguments; parses the values of the flags and of the config."""
    known = {flag.name: flag for flag in flags}
    if "config" in known:
        config, arguments = from_arguments(arguments)
        validate(config, with_data=False)
    before_separator = arguments[: arguments.index("--")] if "--" in arguments else arguments
    flag_values = [argument[2:].partition("=") for argument in before_separator if argument.startswith("--")]
    for name, _, value in flag_values:
        assert name in known, name
        known[name].parser.parse(value or known[name].default)
    names = {name for name, _, _ in flag_values}
    absent = [flag.name for flag in flags if getattr(flag, "is_positional", False) and flag.name not in names]
    positional = [argument for argument in before_separator if not argument.startswith("--")]
    return names | {name for name, _ in zip(absent, positional)}


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_from_beginning_to_end(page, checkpoint, tmp_path, monkeypatch):  # noqa: F811
    write_inputs(tmp_path, checkpoint)
    monkeypatch.chdir(tmp_path)
    assert Reader(tmp_path).follow(page) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("block", SAID, ids=lambda block: block.notes["said by"])
def test_errors_equal_the_errors_of_the_page(block, checkpoint, tmp_path):  # noqa: F811
    write_inputs(tmp_path, checkpoint)
    module, arguments = module_of(shlex.split(block.notes["said by"]))
    result = run(module, *arguments, cwd=tmp_path)
    wanted = ".*".join(map(re.escape, block.text.split("...")))
    assert result.returncode == 1 and re.fullmatch(wanted, result.stderr), result.stderr


@pytest.mark.parametrize("block", IN_CODE, ids=lambda block: block.notes["in"])
def test_errors_that_no_command_reproduces_are_in_the_code(block):
    code = re.sub(r"\{[^{}]*\}", "...", (ROOT / block.notes["in"]).read_text())
    for words in block.text.removeprefix("error: ").strip().split("..."):
        assert words.strip() in code, words


@pytest.mark.parametrize(
    "config, heading", [(pretraining_config(), "Pre-training"), (fine_tuning_config("tag"), "Fine-tuning")]
)
def test_the_reference_has_all_fields_and_defaults(config, heading, reference):
    pages = reference.config_fields()
    documented = {field.name: field for field in (*pages["All runs"], *pages[heading])}

    def check(section, prefix):
        for name, value in section.items():
            field = documented.pop(f"{prefix}{name}")
            if field.default is None:  # a section
                check(value, f"{prefix}{name}.")
            elif "placeholder" not in field.default:
                assert ast.literal_eval(field.default) == value, field

    check({name: value for name, value in config.items() if name not in ("task", "model", "stages")}, "")
    documented.pop("stages", None)
    assert not documented


def test_the_reference_has_the_comments_of_the_code(reference):
    """The comment is above a field, at the end of its line, or above the section of the field."""
    common = {field.name: field.comment for field in reference.config_fields()["All runs"]}
    assert common["seed"] == "for initial weights, order of examples, dropout"
    assert common["remat"].startswith(
        "The values that the backward pass recomputes to save memory: none | dots (all but matrix"
    )
    assert (common["mesh"], common["mesh.fsdp"]) == ("-1: the remaining devices", "")
    assert (
        "`--temperature` | `1.0` | With --generate: the temperature of sampling; 0 always" in reference.commands_page()
    )
    assert r"| `model.norm` | `'post'` | LayerNorm after each sum; before each part (GPT-2) (post \| pre) |" in (
        reference.config_page()
    )


@pytest.mark.parametrize("url", ["", "https://host/x"])
def test_links_out_of_docs_lead_to_the_site_or_to_the_repository(url):
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", SITE / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    def shown(text, path):
        page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=path))
        return hooks.on_page_markdown(text, page, types.SimpleNamespace(repo_url=url), None)

    assert (
        shown("[a](../../experiments/ablations/RESULTS.md#b)", "tutorials/pod.md") == "[a](../results/comparisons.md#b)"
    )
    assert shown("![a](objective.png)", "results/comparisons.md") == "![a](objective.png)"
    assert shown("[a](tutorials/python.ipynb)", "index.md") == "[a](tutorials/python.md)"
    assert shown("[a](python.ipynb) [b](pod.md)", "tutorials/python.md") == "[a](python.ipynb) [b](pod.md)"
    assert shown("[a](https://b) [a](text.md#c)", "runs.md") == "[a](https://b) [a](text.md#c)"
    outside = "[a](https://host/x/blob/main/tests/conftest.py)" if url else "a (`tests/conftest.py`)"
    assert shown("[a](../tests/conftest.py)", "text.md") == outside
    assert shown(r"| `a\|b` | c\|d |", "text.md") == r"| `a|b` | c\|d |"

"""Hooks of a user: named or passed as objects, their requests, and their errors."""

import os
import signal

import jax
import pytest

from bertjax.common.errors import UserError
from bertjax.config.resolved import Resolution, ResolvedConfig
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import RunInfo
from bertjax.training.hooks import Hook, register
from bertjax.training.hooks.registry import HOOKS, validate
from bertjax.training.loop import train_task
from bertjax.training.run import Run, RunKind
from bertjax.training.run import run_training as run_one
from bertjax.training.trackers.jsonl import read_metrics
from tests.training.test_loop import stop_when, toy_program  # noqa: F401
from tests.training.toy import Toy, toy_config


@pytest.fixture
def run(toy_program, tmp_path):  # noqa: F811
    """(objects, **fields of the config) -> the task and the result of `train`, in the test's folder."""

    def run(objects, **fields):
        task = Toy(config := toy_config(**fields))
        return task, train_task(task, config, tmp_path, task.mesh, program=toy_program, hooks=objects)

    return run


class Noted(Hook):
    """Appends its calls to a list that all such hooks share."""

    calls: list = []  # noqa: RUF012

    def __init__(self, name="named"):
        self.name = name

    def on_step(self, run, metrics):
        assert isinstance(metrics["loss"], jax.Array)
        self.calls.append((self.name, run.step))

    def on_end(self, run, error):
        self.calls.append((self.name, error))


@pytest.fixture
def registered():
    register("noted", Noted)
    yield
    Noted.calls.clear()
    del HOOKS.registered["noted"]


def test_a_hook_is_named_in_the_config_or_given_as_an_object(run, registered):
    run([Noted("given")], hooks=("noted,",), eval=dict(every_steps=10))
    assert Noted.calls[:4] == [("given", 1), ("named", 1), ("given", 2), ("named", 2)]
    assert Noted.calls[-2:] == [("named", None), ("given", None)]  # Hooks end in reverse order.


def test_an_object_without_hook_methods_is_refused():
    register("function", print)
    with pytest.raises(UserError, match=r"config.hooks = 'function': .* must be a subclass of bertjax.training.hooks"):
        validate(toy_config(hooks=("function",)))
    del HOOKS.registered["function"]


class Failing(Hook):
    def __init__(self, method):
        self.method = method

    def on_step(self, run, metrics):
        if self.method == "on_step" and run.step == 7:
            raise ValueError("my mistake")

    def on_evaluation(self, run, scores):
        if self.method == "on_evaluation" and run.step == 10:
            raise ValueError("my mistake")


@pytest.mark.parametrize("method, steps, evaluated", [("on_step", [5], [10]), ("on_evaluation", [5, 10], [10])])
def test_a_hook_that_raises_stops_the_run_which_can_be_resumed(run, registered, tmp_path, method, steps, evaluated):
    with pytest.raises(ValueError, match="my mistake") as raised:
        run([Failing(method), Noted()])
    assert checkpoint.steps(tmp_path) == steps and Noted.calls[-1] == ("named", raised.value)
    task, trained = run([])
    assert int(trained.state.step) == 10 and task.evaluated == evaluated and trained.scores.score == 1


class ReturnsAtTheEnd(Hook):
    def on_end(self, run, error):
        return "a value"


def test_the_result_of_on_end_does_not_hide_an_error(run):
    with pytest.raises(ValueError, match="my mistake"):
        run([ReturnsAtTheEnd(), Failing("on_step")])


class Requests(Hook):
    def on_step(self, run, metrics):
        {2: run.save, 3: run.evaluate, 7: run.end}.get(run.step, lambda: None)()


def test_a_hook_requests_checkpoints_evaluations_and_the_end(run, tmp_path):
    task, trained = run([Requests()], checkpoint=dict(every_steps=5, keep=9))
    assert checkpoint.steps(tmp_path) == [2, 3, 5, 7] and task.evaluated == [3, 5, 7]
    assert int(trained.state.step) == 7 and trained.scores.score == 1
    task, trained = run([])
    assert int(trained.state.step) == 10 and task.evaluated == [10]


@pytest.mark.parametrize("method, during", [("evaluate", False), ("evaluate", True), ("end", False), ("end", True)])
def test_a_resumed_run_makes_the_evaluation_that_a_hook_requested(toy_program, tmp_path, method, during):  # noqa: F811
    """The run stops at step 3, before or during the evaluation of this step."""

    class RequestsAtStep3(Hook):
        def on_step(self, run, metrics):
            if run.step == 3:
                getattr(run, method)()

    def run_in(folder, task, *hooks):
        train_task(task, task.config, tmp_path / folder, task.mesh, program=toy_program, hooks=hooks)
        return task

    def lines_of(folder):
        lines = read_metrics(tmp_path / folder)
        return [line for line in lines if any(name.startswith("eval/") for name in line)]

    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    run_in("straight", Toy(toy_config()), RequestsAtStep3())
    run_in("straight", Toy(toy_config()))
    task = Toy(toy_config())
    if during:
        evaluate = task.run
        task.run = lambda *arguments: [*stop(), evaluate(*arguments)]
    else:
        stop_when(task, 3)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 3"):
        run_in("stopped", task, RequestsAtStep3())
    assert checkpoint.steps(tmp_path / "stopped") == [3] and lines_of("stopped") == []
    task = run_in("stopped", Toy(toy_config()))
    assert task.evaluated == [3, 5, 10] and lines_of("stopped") == lines_of("straight")
    assert run_in("stopped", Toy(toy_config())).evaluated == []


class ToyRun(Run):
    def initial_params(self, params):
        return params

    def report(self, trained):
        return "trained"

    def reopen(self, config):
        raise NotImplementedError


class ToyKind(RunKind):
    planning, changes_of_data = None, None

    def identity(self, config):
        return ()

    def resolve(self, config, info):
        return Resolution(ResolvedConfig.copy_of(config))

    def total_steps(self, config, info):
        return Toy.total_steps

    def open(self, config, workdir, info):
        task = Toy(config)
        return ToyRun(config, task.mesh, task, RunInfo(config), None, [])


def test_the_report_names_the_step_at_which_a_hook_has_ended_the_run(toy_program, tmp_path):  # noqa: F811
    for hooks, report in (([Requests()], "trained\nstopped early, at step 7 of 10\n"), ([], "trained\n")):
        run_one(ToyKind(), toy_config(), tmp_path, lambda opened: (opened, toy_program), hooks=hooks)
        assert (tmp_path / "report.txt").read_text() == report

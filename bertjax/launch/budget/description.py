"""Describes a plan: lines with the numbers of a run, and the flag that changes each number."""

import jax
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.progress import describe_bytes, duration
from bertjax.config import budget
from bertjax.config.stages import stages_of
from bertjax.launch.budget.choice import Text
from bertjax.launch.budget.steps import StepTimes, evaluations, manifest_or_empty, other_seconds, unique_tokens
from bertjax.launch.budget.survey import Survey
from bertjax.training.monitoring.memory import min_step_bytes, usable_memory
from bertjax.training.run import Run
from bertjax.training.step import Program


def lines_of_text(config: ConfigDict, text: Text, surveyed: Survey | None, bytes_per_token: float) -> list[str]:
    """Returns lines about the text of a recipe. `surveyed`: None for prepared records."""
    files = letters = about = ""
    if surveyed is not None:
        about = "" if surveyed.is_whole else "about "
        files = f"{surveyed.files} file{'s' * (surveyed.files != 1)}, " if surveyed.files else ""
        shares = [f"{share:.0%} {name.title()}" for name, share in surveyed.scripts.items() if share >= 0.05]
        letters = f", letters {', '.join(shares)}" if shares else ""
    return [
        f"text: {files}{about}{describe_bytes(text.bytes)}, {about}{text.documents:,.0f} documents, about "
        f"{_count(text.bytes / bytes_per_token)} tokens{letters} (--config.data.{'corpus' if surveyed else 'records'})",
        f"held out: {config.data.heldout_fraction:.1%} of the documents (--config.data.heldout_fraction)",
        f"vocabulary: {config.model.vocab_size:,} tokens, {config.tokenizer.kind} (--config.model.vocab_size, "
        f"--config.tokenizer.kind)",
    ]


def lines_of_data(opened: Run, workdir: epath.Path) -> list[str]:
    """Returns lines about the data of a run without a recipe."""
    config = opened.config
    if "stages" not in config:
        return [f"data: {opened.info.train_examples:,} training examples (--config.data.path)"]
    counts = manifest_or_empty(config, workdir).get("corpus")
    if not counts:
        return []
    tokens = _count(counts["train_tokens"])
    return [
        f"text: {counts['train_documents']:,} documents, {tokens} tokens (--config.data.corpus)",
        f"held out: {counts['heldout_documents']:,} documents (--config.data.heldout_fraction)",
        f"vocabulary: {config.model.vocab_size:,} tokens (--config.model.vocab_size, --config.tokenizer.kind)",
    ]


def lines_of_run(
    opened: Run, workdir: epath.Path, program: Program, measured: StepTimes, factor: float, elapsed: float
) -> list[str]:
    """Returns lines about the model, the steps, the time and the memory.

    Args:
      opened: the run with the numbers of the plan.
      workdir: the folder of the run.
      program: the compiled functions of the run.
      measured: the times of the run before the plan changed the number of steps.
      factor: the FLOPs of the run, relative to the FLOPs of the measured run.
      elapsed: the seconds since the start of the command.
    """
    config, total, model = opened.config, opened.task.total_steps, opened.config.model
    params = sum(x.size for x in jax.tree.leaves(program.state.params))
    lines = [
        f"model: {model.family}, {model.get('num_hidden_layers', 0)} layers of {model.get('hidden_size', 0)}, "
        f"{_count(params)} params (--config.model.num_hidden_layers, --config.model.hidden_size)"
    ]
    if "stages" in config:
        stages = stages_of(config)
        lines += [
            f"stage {stage.name}: {stage.steps:,} steps of {stage.batch_size} sequences of {stage.length} tokens "
            f"(--config.stages.{stage.name}.steps, --config.batch_size)"
            for stage in (stages if len(stages) <= 4 else stages[-1:])
        ]
        shares = manifest_or_empty(config, workdir).get("real_tokens_share", {})  # the other tokens are padding
        tokens = sum(stage.steps * stage.tokens_per_step * shares.get(str(stage.length), 1.0) for stage in stages)
        unique = unique_tokens(config, workdir)
        epochs = f", {tokens / unique:,.1f} epochs over the text" if unique else ""
        lines.append(f"tokens: {_count(tokens)}{epochs} (--config.budget, such as 200M)")
    else:
        lines.append(f"epochs: {config.epochs:g}, {total:,} steps of {config.batch_size} examples (--config.epochs)")
    steps = measured.steps * factor
    rest = other_seconds(measured, evaluations(config, total, steps))
    lines.append(
        f"time: about {duration(elapsed + steps + rest)} in total: {duration(elapsed)} so far, {duration(steps)} for "
        f"the steps, {duration(rest)} for evaluation and report (--config.budget)"
    )
    if "stages" not in config and elapsed + steps + rest < 0.8 * budget.parse_budget(config.budget).seconds:
        lines.append("the budget is larger than all epochs need; more epochs (--config.epochs) take longer")
    device, limit = opened.mesh.devices.flat[0], ""
    if jax.process_count() == 1 or device.platform != "cpu":
        limit = f" of {describe_bytes(usable_memory(device))}"
    needed = describe_bytes(min_step_bytes(config, program))
    return [*lines, f"memory: at least {needed}{limit} (--config.batch_size, --config.microbatches)"]


def _count(number: float) -> str:
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:,.1f} {name}"
    return f"{number:,.0f}"

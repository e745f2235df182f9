"""Describes a plan: lines with the numbers of a run, and the flag that changes each."""

import jax
from etils import epath

from bertjax.common.progress import describe_bytes, duration
from bertjax.config import budget
from bertjax.config.stages import stages_of
from bertjax.launch.budget import survey
from bertjax.launch.budget.choice import Text
from bertjax.launch.budget.steps import StepTimes, evaluations, manifest_of, reserve, unique_tokens
from bertjax.training.monitoring.memory import min_step_bytes, usable_memory
from bertjax.training.run import Run
from bertjax.training.step import Program


def lines_of_text(config, text: Text, found: survey.Survey | None, bytes_per_token: float) -> list[str]:
    tokens, whole = text.bytes / bytes_per_token, found is None or found.is_whole
    about = "" if whole else "about "
    files = f"{found.files} file{'s' * (found.files != 1)}, " if found and found.files else ""
    scripts = {name: share for name, share in (found.scripts if found else {}).items() if share >= 0.05}
    letters = f", letters {', '.join(f'{share:.0%} {name.title()}' for name, share in scripts.items())}"
    return [
        f"text: {files}{about}{describe_bytes(text.bytes)}, {about}{text.documents:,.0f} documents, about "
        f"{_count(tokens)} tokens{letters if scripts else ''} (--config.data.{'corpus' if found else 'records'})",
        f"held out: {config.data.heldout_fraction:.1%} of the documents (--config.data.heldout_fraction)",
        f"vocabulary: {config.model.vocab_size:,} pieces, {config.tokenizer.kind} (--config.model.vocab_size, "
        f"--config.tokenizer.kind)",
    ]


def lines_of_run(
    opened: Run, workdir: epath.Path, program: Program, measured: StepTimes, factor: float, elapsed: float
) -> list[str]:
    config, task = opened.config, opened.task
    params = sum(x.size for x in jax.tree.leaves(program.state.params))
    model = config.model
    lines = [
        f"model: {model.family}, {model.get('num_hidden_layers', 0)} layers of {model.get('hidden_size', 0)}, "
        f"{_count(params)} params (--config.model.num_hidden_layers, --config.model.hidden_size)"
    ]
    if "stages" in config:
        parts = stages_of(config)
        for part in parts if len(parts) <= 4 else parts[-1:]:
            lines.append(
                f"stage {part.name}: {part.steps:,} steps of {part.batch_size} sequences of {part.length} tokens "
                f"(--config.stages.{part.name}.steps, --config.batch_size)"
            )
        shares = manifest_of(config, workdir).get("real_tokens_share", {})  # the others are padding
        tokens = sum(part.steps * part.tokens_per_step * shares.get(str(part.length), 1.0) for part in parts)
        lines.append(f"tokens: {_count(tokens)}{_epochs(config, workdir, tokens)} (--config.budget, such as 200M)")
    else:
        lines.append(
            f"epochs: {config.epochs:g}, {task.total_steps:,} steps of {config.batch_size} examples (--config.epochs)"
        )
    steps = measured.steps * factor
    rest = reserve(measured, evaluations(config, task.total_steps, steps))
    lines.append(
        f"time: about {duration(elapsed + steps + rest)} in all: {duration(elapsed)} until here, {duration(steps)} for "
        f"the steps, {duration(rest)} for evaluation and report (--config.budget)"
    )
    if "stages" not in config and elapsed + steps + rest < 0.8 * budget.parse(config.budget).seconds:
        lines.append("the budget is larger than all epochs need; more epochs (--config.epochs) take longer")
    needed, device = min_step_bytes(config, program), opened.mesh.devices.flat[0]
    has = usable_memory(device) if jax.process_count() == 1 or device.platform != "cpu" else None
    of = f" of {describe_bytes(has)}" if has else ""
    lines.append(f"memory: at least {describe_bytes(needed)}{of} (--config.batch_size, --config.microbatches)")
    return lines


def lines_of_data(opened: Run, workdir: epath.Path) -> list[str]:
    """Returns lines about the data of a run without a recipe."""
    config = opened.config
    if "stages" not in config:
        return [f"data: {opened.info.train_examples:,} training examples (--config.data.path)"]
    counts = manifest_of(config, workdir).get("corpus", {})
    if not counts:
        return []
    text, heldout, tokens = (counts[name] for name in ("train_documents", "heldout_documents", "train_tokens"))
    return [
        f"text: {text:,} documents, {_count(tokens)} tokens (--config.data.corpus)",
        f"held out: {heldout:,} documents (--config.data.heldout_fraction)",
        f"vocabulary: {config.model.vocab_size:,} pieces (--config.model.vocab_size, --config.tokenizer.kind)",
    ]


def _epochs(config, workdir: epath.Path, tokens: float) -> str:
    unique = unique_tokens(config, workdir)
    return f", {tokens / unique:,.1f} epochs over the text" if unique else ""


def _count(number: float) -> str:
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:,.1f} {name}"
    return f"{number:,.0f}"

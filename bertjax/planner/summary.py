"""Formats plans as tables and as JSON."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from bertjax.distributed.gpus import GIB, Machines
from bertjax.distributed.topology import Accelerator
from bertjax.planner.plan import StagePlan
from bertjax.training.monitoring.memory import as_flags

LEFT_OUT = {
    "tpu": """\
estimated step: the compiler's cycle estimate for computation, divided by the chip's clock. The estimate excludes
network time (see the collectives), copies between memories and waiting for data: a real step takes longer.""",
    "gpu": """\
least step: a lower bound, not an estimate. A kernel takes at least the longest of three times: of its matrix products,
of its other operations and of its memory traffic, at the rates of the data sheet. Collectives may run beside kernels,
and take at least the time of the links. A real step takes longer. Attention is counted for rows with one segment;
padding and packing reduce this work.""",
}
_SIZES = (
    "chips", "batch_size", "rows", "length", "remat", "unroll", "params_bytes", "optimizer_bytes", "hbm_used_bytes",
    "hbm_available_bytes", "flops_per_step",
)  # fmt: skip
_BOUNDS = ("least_step_seconds", "most_mfu", "least_cost_dollars")  # of GPUs
_ESTIMATES = ("estimated_step_seconds", "estimated_mfu", "estimated_cost_dollars")  # of TPUs


def as_json(plans: list[StagePlan], price_per_chip_hour: float | None = None) -> str:
    """Returns a list with an object for each stage. Sizes are per chip, and costs per stage for all chips.

    A value is null if it depends on the data, or if the stage does not fit. Estimates are null for GPUs, bounds are
    null for TPUs, and costs are null without a price.
    """
    return json.dumps([_json_object(plan, price_per_chip_hour) for plan in plans], indent=1)


def _json_object(plan: StagePlan, price: float | None) -> dict[str, Any]:
    cost = None
    if price is not None and plan.estimated_step_seconds and plan.steps:
        cost = plan.steps * plan.estimated_step_seconds / 3600 * plan.chips * price
    names, missing = (_BOUNDS, _ESTIMATES) if plan.roofline else (_ESTIMATES, _BOUNDS)
    return {
        "stage": plan.name,
        "steps": plan.steps or None,
        **{name: getattr(plan, name) for name in _SIZES},
        **dict(zip(names, (plan.estimated_step_seconds, plan.estimated_mfu, cost))),
        **dict.fromkeys(missing),
        "collectives": list(map(dataclasses.asdict, plan.collectives)),
        "roofline": list(map(dataclasses.asdict, plan.roofline.works)) if plan.roofline else [],
    }


def as_table(
    plans: list[StagePlan], accelerator: Accelerator | Machines, price_per_chip_hour: float | None = None
) -> str:
    """Returns a table for a terminal: a column for each stage, then the collectives, then the sum of all stages."""
    is_gpu = accelerator.platform == "gpu"
    chip = "GPU" if is_gpu else "chip"
    rows = _rows(plans, accelerator)
    left = max(len(title) for title, _ in rows)
    width = max(len(cell) for _, cells in rows for cell in cells)
    lines = [f"{title:<{left}}  " + "  ".join(f"{cell:>{width}}" for cell in cells) for title, cells in rows]
    lines.append("")
    for plan in plans:
        lines += _details(plan)
    if all(plan.fits and plan.steps for plan in plans):
        days = sum(map(_days, plans))
        cost, hours = "", days * 24 * accelerator.chips
        if price_per_chip_hour is not None:
            cost = f", {hours:,.0f} {chip}-hours at {price_per_chip_hour:g}: ${hours * price_per_chip_hour:,.0f}"
        least = "at least " if is_gpu else ""
        lines += ["", f"all stages: {least}{days:,.2f} days of {accelerator.chips} {chip}s{cost}"]
    return "\n".join([*lines, "", LEFT_OUT[accelerator.platform]])


def _rows(plans: list[StagePlan], accelerator: Accelerator | Machines) -> list[tuple[str, list[str]]]:
    """Returns the rows of the table: titles, and a cell for each stage."""
    is_gpu = accelerator.platform == "gpu"
    chip, step, most = ("GPU", "least step", ", at most") if is_gpu else ("chip", "estimated step", "")

    def row(title: str, text: Callable[[StagePlan], str]) -> tuple[str, list[str]]:
        return title, [text(plan) for plan in plans]

    def time_row(title: str, text: Callable[[StagePlan], str]) -> tuple[str, list[str]]:
        return row(title, lambda plan: text(plan) if plan.fits else "does not fit")

    rows = [
        row(accelerator.description, lambda plan: plan.name),
        row("batch x length", _batch),
        row(f"memory per {chip}: params", lambda plan: _gib(plan.params_bytes)),
        row("  optimizer", lambda plan: _gib(plan.optimizer_bytes)),
    ]
    if any(plan.memory_bytes for plan in plans):
        rows.append(row("  memory of rows", lambda plan: _gib(plan.memory_bytes)))
    rows += [
        row("  activations and the rest", lambda plan: _gib(plan.activations_bytes) if plan.fits else ""),
        row("  total", lambda plan: _gib(plan.hbm_used_bytes)),
        row("  free", lambda plan: "" if plan.missing_bytes is None else _gib(-plan.missing_bytes)),
        row("remat", lambda plan: plan.remat),
        row("unroll", lambda plan: "yes" if plan.unroll else "no"),
        row("FLOPs per step", lambda plan: f"{plan.flops_per_step / 1e12:,.2f} T"),
        time_row(step, lambda plan: f"{plan.step_seconds * 1e3:,.1f} ms"),
    ]
    shares = [plan.roofline.by_category() if plan.roofline else {} for plan in plans]
    for category in dict.fromkeys(category for share in shares for category in share):
        cells = [f"{share[category] * 1e3:,.1f} ms" if category in share else "" for share in shares]
        rows.append((f"    {category}", cells))
    rows += [
        time_row(f"  sequences/s{most}", lambda plan: f"{plan.batch_size / plan.step_seconds:,.0f}"),
        time_row(f"  MFU{most}", lambda plan: f"{plan.estimated_mfu:.1%}"),
    ]
    if all(plan.steps for plan in plans):
        rows += [row("  steps", lambda plan: f"{plan.steps:,}"), time_row("  days", lambda plan: f"{_days(plan):,.2f}")]
    return [*rows, time_row("compile time", lambda plan: f"{plan.compile_seconds:.0f} s")]


def _details(plan: StagePlan) -> list[str]:
    """Returns lines about the collectives and the kernels of a stage."""
    lines = [f"collectives of stage {plan.name}, per step:"] if plan.collectives else []
    for collective in plan.collectives:
        place = f"{collective.count} of them, {'in the loop' if collective.in_loop else 'once'}"
        cells = f"{collective.kind:<18} {collective.dtype:<5} {_bytes(collective.bytes):>10}"
        lines.append(f"  {cells}  over {' and '.join(collective.axes)}, {place}")
    if plan.roofline:
        lines.append(f"kernels of stage {plan.name}, per step and GPU:")
        for work in plan.roofline.works:
            flops = f"{work.flops / 1e12:,.2f} TFLOP" if work.flops else ""
            cells = f"{work.seconds * 1e3:>9,.2f} ms {_bytes(work.bytes):>11} {flops:>13}"
            lines.append(f"  {work.category:<18} {work.name:<26} {cells}  {work.calls:,} of them")
    return lines


def out_of_memory(plans: list[StagePlan], settings: dict[str, Any] | None) -> str:
    """Returns a line with the missing memory of all stages, and the settings with which all stages fit."""
    if settings is None:
        remedy = "no setting tried (remat, microbatches, fsdp) is enough; use more chips or a smaller batch_size"
    else:
        remedy = f"it fits with {as_flags(settings)}"
    return "; ".join([*map(_missing, plans), remedy])


def _missing(plan: StagePlan) -> str:
    amount = ""
    if plan.missing_bytes is not None:
        available = _gib(plan.hbm_available_bytes)
        amount = f" by {_gib(plan.missing_bytes)} (needs {_gib(plan.hbm_used_bytes)} of {available} each)"
    return f"stage {plan.name} (length {plan.length}) runs out of memory{amount}"


def _days(plan: StagePlan) -> float:
    return plan.steps * plan.step_seconds / 86_400


def _batch(plan: StagePlan) -> str:
    rows = "" if plan.rows == plan.batch_size else f" in {plan.rows:,}"
    return f"{plan.batch_size:,}{rows} x {plan.length}"


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / GIB:,.2f} GiB"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"

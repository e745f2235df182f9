"""Formats plans as tables and as JSON."""

import dataclasses
import json

from bertjax.distributed.gpus import GIB, Machines
from bertjax.distributed.topology import Accelerator
from bertjax.planner.plan import StagePlan
from bertjax.training.monitoring.memory import as_flags

LEFT_OUT = {
    "tpu": """\
estimated step: the compiler's cycle estimate for computation, divided by the chip's clock. It excludes network
time (see the collectives), copies between memories and waiting for data: a real step takes longer.""",
    "gpu": """\
least step: a lower bound, not an estimate. A kernel takes at least the time of its products, of its other operations
and of its memory traffic at the data sheet's rates, and collectives, which may run beside kernels, that of the links.
A real step takes longer. Attention is counted for rows of one segment; padding and packing save some of it.""",
}


def as_json(plans: list[StagePlan], price_per_chip_hour: float | None = None) -> str:
    """Returns a list with one object per stage, whose sizes are a chip's; costs are a stage's, of all chips.

    Values that only the data knows, or a stage that fits, are null; so are estimates for a GPU, of which there are
    bounds instead, and bounds for a TPU, and costs without a price.
    """

    def times(p: StagePlan) -> dict:
        names = (
            ("least_step_seconds", "most_mfu", "least_cost_dollars"),
            ("estimated_step_seconds", "estimated_mfu", "estimated_cost_dollars"),
        )
        ours, others = names if p.roofline else names[::-1]
        cost = None
        if price_per_chip_hour is not None and p.estimated_step_seconds and p.steps:
            cost = p.steps * p.estimated_step_seconds / 3600 * p.chips * price_per_chip_hour
        return dict(zip(ours, (p.estimated_step_seconds, p.estimated_mfu, cost))) | dict.fromkeys(others)

    return json.dumps(
        [
            {
                "stage": p.name,
                "steps": p.steps or None,
                "chips": p.chips,
                "batch_size": p.batch_size,
                "rows": p.rows,
                "length": p.length,
                "remat": p.remat,
                "unroll": p.unroll,
                "params_bytes": p.params_bytes,
                "optimizer_bytes": p.optimizer_bytes,
                "hbm_used_bytes": p.hbm_used_bytes,
                "hbm_available_bytes": p.hbm_available_bytes,
                "flops_per_step": p.flops_per_step,
                **times(p),
                "collectives": [
                    {"kind": c.kind, "axes": c.axes, "dtype": c.dtype, "bytes": c.bytes, "count": c.count,
                     "in_loop": c.in_loop}
                    for c in p.collectives
                ],
                "roofline": [dataclasses.asdict(work) for work in p.roofline.works] if p.roofline else [],
            }
            for p in plans
        ],
        indent=1,
    )  # fmt: skip


def as_table(
    plans: list[StagePlan], accelerator: Accelerator | Machines, price_per_chip_hour: float | None = None
) -> str:
    """A table for a terminal: one column per stage, then the collectives, then the total over all stages."""
    counted = [
        ("  steps", [f"{p.steps:,}" for p in plans]),
        ("  days", [_or_blank(p, lambda p: f"{_days(p):,.2f}") for p in plans]),
    ]
    is_gpu = accelerator.platform == "gpu"
    chip, step, most = ("GPU", "least step", ", at most") if is_gpu else ("chip", "estimated step", "")
    rows: list[tuple[str, list[str]]] = [
        (accelerator.description, [p.name for p in plans]),
        ("batch x length", [_batch(p) for p in plans]),
        (f"memory per {chip}: params", [_gib(p.params_bytes) for p in plans]),
        ("  optimizer", [_gib(p.optimizer_bytes) for p in plans]),
        *[("  memory of rows", [_gib(p.memory_bytes) for p in plans])] * any(p.memory_bytes for p in plans),
        ("  activations and the rest", [_gib(p.activations_bytes) if p.fits else "" for p in plans]),
        ("  total", [_gib(p.hbm_used_bytes) for p in plans]),
        ("  free", [_free(p) for p in plans]),
        ("remat", [p.remat for p in plans]),
        ("unroll", ["yes" if p.unroll else "no" for p in plans]),
        ("FLOPs per step", [f"{p.flops_per_step / 1e12:,.2f} T" for p in plans]),
        (step, [_or_blank(p, lambda p: f"{p.estimated_step_seconds * 1e3:,.1f} ms") for p in plans]),
        *_shares(plans),
        (f"  sequences/s{most}", [_or_blank(p, _rate) for p in plans]),
        (f"  MFU{most}", [_or_blank(p, lambda p: f"{p.estimated_mfu:.1%}") for p in plans]),
        *(row for row in counted if all(p.steps for p in plans)),
        ("compile time", [_or_blank(p, lambda p: f"{p.compile_seconds:.0f} s") for p in plans]),
    ]
    left = max(len(title) for title, _ in rows)
    width = max(len(cell) for _, cells in rows for cell in cells)
    lines = [f"{title:<{left}}  " + "  ".join(f"{cell:>{width}}" for cell in cells) for title, cells in rows]
    lines.append("")
    for p in plans:
        lines += [f"collectives of stage {p.name}, per step:"] if p.collectives else []
        for c in p.collectives:
            where = f"over {' and '.join(c.axes)}, {c.count} of them, {'in the loop' if c.in_loop else 'once'}"
            lines.append(f"  {c.kind:<18} {c.dtype:<5} {_bytes(c.bytes):>10}  {where}")
        if p.roofline:
            lines.append(f"kernels of stage {p.name}, per step and GPU:")
            for work in p.roofline.works:
                flops = f"{work.flops / 1e12:,.2f} TFLOP" if work.flops else ""
                cells = f"{work.seconds * 1e3:>9,.2f} ms {_bytes(work.bytes):>11} {flops:>13}"
                lines.append(f"  {work.category:<18} {work.name:<26} {cells}  {work.calls:,} of them")
    if all(p.fits and p.steps for p in plans):
        days = sum(map(_days, plans))
        cost, hours = "", days * 24 * accelerator.chips
        if price_per_chip_hour is not None:
            cost = f", {hours:,.0f} {chip}-hours at {price_per_chip_hour:g}: ${hours * price_per_chip_hour:,.0f}"
        least = "at least " if is_gpu else ""
        lines += ["", f"all stages: {least}{days:,.2f} days of {accelerator.chips} {chip}s{cost}"]
    return "\n".join([*lines, "", LEFT_OUT[accelerator.platform]])


def _shares(plans: list[StagePlan]) -> list[tuple[str, list[str]]]:
    """Rows that say where the time goes, of plans with a roofline."""
    parts = [p.roofline.by_category() if p.roofline else {} for p in plans]
    categories = dict.fromkeys(category for part in parts for category in part)
    return [
        (f"    {category}", [f"{part[category] * 1e3:,.1f} ms" if category in part else "" for part in parts])
        for category in categories
    ]


def out_of_memory(plans: list[StagePlan], settings: dict | None) -> str:
    """One line that says by how much each stage exceeds the memory, and with which settings all of them fit."""
    if settings is None:
        remedy = "no setting tried (remat, microbatches, fsdp) is enough; use more chips or a smaller batch_size"
    else:
        remedy = f"it fits with {as_flags(settings)}"
    return "; ".join([*map(_missing, plans), remedy])


def _missing(plan: StagePlan) -> str:
    by = ""
    if plan.hbm_used_bytes is not None:
        by = (
            f" by {_gib(plan.hbm_used_bytes - plan.hbm_available_bytes)} (needs {_gib(plan.hbm_used_bytes)} of "
            f"{_gib(plan.hbm_available_bytes)} each)"
        )
    return f"stage {plan.name} (length {plan.length}) runs out of memory{by}"


def _days(plan: StagePlan) -> float:
    return plan.steps * plan.estimated_step_seconds / 86_400


def _rate(plan: StagePlan) -> str:
    return f"{plan.batch_size / plan.estimated_step_seconds:,.0f}"


def _free(plan: StagePlan) -> str:
    return "" if plan.hbm_used_bytes is None else _gib(plan.hbm_available_bytes - plan.hbm_used_bytes)


def _or_blank(plan: StagePlan, text) -> str:
    return text(plan) if plan.fits else "does not fit"


def _batch(p: StagePlan) -> str:
    return (
        f"{p.batch_size:,} x {p.length}" if p.rows == p.batch_size else f"{p.batch_size:,} in {p.rows:,} x {p.length}"
    )


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / GIB:,.2f} GiB"


def _bytes(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"

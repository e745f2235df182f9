"""Describes this installation for a bug report.

    bertjax doctor

Prints at most 20 lines: versions, the devices that JAX lists, cores and memory, caches with their sizes, free disk,
optional packages with the extras that install them, and missing or broken parts, each with the fix. --json prints one
object.
"""

import json
import sys
from typing import NoReturn

try:
    from absl import flags

    from bertjax.cli.app import run_command

    _JSON = flags.DEFINE_bool("json", False, "Print one JSON object, with all problems.")
    _FAILURE: Exception | None = None
except Exception as error:  # A package that all commands need is missing or broken.
    _FAILURE = error


def main(arguments: list[str]) -> None:
    """Prints the report."""
    from bertjax.cli.flags import refuse_arguments

    refuse_arguments(arguments, "doctor takes --json only")
    report(_JSON.value)


def report(as_json: bool) -> None:
    """Prints the report, and the import error that stops all other commands."""
    from bertjax.launch import doctor

    probes = {"commands": _raise_failure, **doctor.PROBES} if _FAILURE else doctor.PROBES
    diagnosis = doctor.diagnose(probes)
    print(json.dumps(diagnosis.as_json()) if as_json else "\n".join(diagnosis.lines()), flush=True)


def _raise_failure() -> NoReturn:
    assert _FAILURE is not None
    raise _FAILURE


if __name__ == "__main__":
    if _FAILURE:
        report("--json" in sys.argv)
    else:
        run_command(main)

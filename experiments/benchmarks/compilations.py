"""Counts the programs that XLA compiles for one command of training. A sweep runs its trials in one process.

Command:  PYTHONPATH=CHECKOUT python experiments/benchmarks/compilations.py --config=quickstart --workdir=DIR
Needs:    pip install -e ., and the same versions of the packages for all commits that are compared

All arguments are arguments of `bertjax train`. The script trains with the `bertjax` of the checkout that PYTHONPATH
names, and then prints the number of programs and the path of the package. A program that the compilation cache
returns counts too.
"""

import runpy

from jax import monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"  # the event of JAX for a program that XLA compiles


def main() -> None:
    """Trains and prints the number of programs."""
    import bertjax

    compiled: list[str] = []

    def count(event: str, seconds: float, **details: object) -> None:
        if event == COMPILED:
            compiled.append(event)

    monitoring.register_event_duration_secs_listener(count)
    try:
        runpy.run_module("bertjax.main", run_name="__main__", alter_sys=True)
    finally:
        print(f"{len(compiled)} programs, {bertjax.__file__}")


if __name__ == "__main__":
    main()

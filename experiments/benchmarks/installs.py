"""Checks with a resolver, for each Python and platform, whether all dependencies of bertjax have wheels.

Command:  python -m experiments.benchmarks.installs            (--extra=test,... adds extras)
Needs:    pip install uv; network
Results:  docs/install.md
"""

import argparse
import pathlib
import re
import subprocess
import tempfile
from unittest import mock

import setuptools

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = {
    "Linux, x86-64": "x86_64-manylinux_2_28",
    "Linux, Arm": "aarch64-manylinux_2_28",
    "macOS, Apple silicon": "aarch64-apple-darwin",
    "macOS, Intel": "x86_64-apple-darwin",
    "Windows": "x86_64-pc-windows-msvc",
}
SOURCES = ("promise",)  # a dependency of TensorFlow Datasets without wheels, which needs no compiler


def requirements(extras: list[str]) -> list[str]:
    root = pathlib.Path(__file__).parents[2]
    with mock.patch.object(setuptools, "setup") as setup:
        code = compile((root / "setup.py").read_text(), str(root / "setup.py"), "exec")
        exec(code, {"__file__": str(root / "setup.py"), "__name__": "__main__"})
    given = setup.call_args.kwargs
    return [*given["install_requires"], *(each for extra in extras for each in given["extras_require"][extra])]


def resolve(given: list[str], python: str, platform: str) -> str:
    """Returns the number of packages, with or without TensorFlow, or the package without a wheel."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, left_out = pathlib.Path(folder) / "wanted.in", pathlib.Path(folder) / "left_out.in"
        wanted.write_text("\n".join(given))
        left_out.write_text("\n".join(f"{name}; sys_platform == 'none'" for name in SOURCES))
        command = ["uv", "pip", "compile", "--quiet", "--only-binary=:all:", "--no-header", "--no-annotate"]
        command += [f"--override={left_out}", f"--python-version={python}", f"--python-platform={platform}"]
        done = subprocess.run([*command, str(wanted)], capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())
        found = re.search(r"([\w.-]+)(?:==\S+|[<>]=?\S+)? ha(?:s|ve) no (?:usable )?wheels", said)
        return f"no: {found[1] if found else said[:120]}"
    packages = [line for line in done.stdout.splitlines() if "==" in line]
    has_tensorflow = any(re.match(r"tensorflow(-cpu)?==", line) for line in packages)
    return f"{len(packages)} packages{'' if has_tensorflow else ', without TensorFlow'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", default="", help="extras, separated by commas")
    given = requirements([extra for extra in parser.parse_args().extra.split(",") if extra])
    print(f"| | {' | '.join(PYTHONS)} |\n|---|{'---|' * len(PYTHONS)}", flush=True)
    for name, platform in PLATFORMS.items():
        print(f"| {name} | {' | '.join(resolve(given, python, platform) for python in PYTHONS)} |", flush=True)


if __name__ == "__main__":
    main()

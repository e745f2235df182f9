"""Describes an installation for a bug report: versions, devices, memory, caches, optional packages, and problems.

This module imports only the standard library, so that the description works if a package is missing or broken. JAX and
libtpu are loaded in other processes, because loading them may hang or crash.
"""

import concurrent.futures
import contextlib
import dataclasses
import glob
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bertjax.common import caches
from bertjax.distributed import topology

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow", "numpy")
TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-macos")  # packages with the module `tensorflow`
# Environment variables that change what JAX and the libraries do.
VARIABLES = (
    "JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH",
    "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_ENABLE_X64", "HF_HUB_OFFLINE", "PYTHONPATH",
)  # fmt: skip
MOST_LINES, MOST_CHARACTERS = 20, 200  # lines of a report; characters of a reason or a variable
SECONDS = 60.0  # time limit for JAX to list its devices, and for libtpu to load
WALK_SECONDS = 2.0  # time limit for measuring the size of a cache
LITTLE = 10**9  # bytes of free disk that are too few
REINSTALL, CHECKOUT = "pip install --force-reinstall", "pip install -e . in the checkout of bertjax"

LIST_DEVICES = """
import contextlib, json, jax
devices = []
for device in jax.local_devices():
    memory = {}
    with contextlib.suppress(Exception):
        memory = device.memory_stats() or {}
    devices.append(dict(platform=device.platform, kind=device.device_kind, memory=memory.get("bytes_limit")))
print(json.dumps(devices))
"""
LOAD_LIBTPU = "import ctypes, libtpu; ctypes.CDLL(libtpu.get_library_path())"


class Problem(NamedTuple):
    """A missing or broken part of the installation, and how to repair it."""

    text: str
    fix: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a probe.

    Args:
      lines: the result as text.
      data: the result as JSON.
      problems: the missing and broken parts.
    """

    lines: tuple[str, ...]
    data: Any
    problems: tuple[Problem, ...] = ()


Probe = Callable[[], Finding]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The results of all probes, by the name of the probe."""

    findings: Mapping[str, Finding]

    @property
    def problems(self) -> list[Problem]:
        """Returns the problems of all findings."""
        return [problem for finding in self.findings.values() for problem in finding.problems]

    def lines(self) -> list[str]:
        """Returns the report, at most `MOST_LINES` lines."""
        lines = [line for finding in self.findings.values() for line in finding.lines]
        problems = [f"problem: {text}; fix: {fix}" for text, fix in self.problems] or ["problems: none"]
        if len(lines) + len(problems) > MOST_LINES:
            shown = max(0, MOST_LINES - len(lines) - 1)
            problems[shown:] = [f"problem: {len(problems) - shown} more, which --json lists"]
        return [" ".join(line.split()) for line in [*lines, *problems]][:MOST_LINES]

    def as_json(self) -> dict[str, Any]:
        """Returns the data of the findings by the name of the probe, and `problems`."""
        problems = [problem._asdict() for problem in self.problems]
        return {**{name: finding.data for name, finding in self.findings.items()}, "problems": problems}


def diagnose(probes: Mapping[str, Probe] | None = None) -> Diagnosis:
    """Runs probes at the same time. If a probe raises an exception, the report contains the reason.

    Args:
      probes: {name: probe}; None for all of `PROBES`.
    """
    probes = PROBES if probes is None else probes
    with concurrent.futures.ThreadPoolExecutor(len(probes)) as pool:
        return Diagnosis(dict(zip(probes, pool.map(_run, probes, probes.values()))))


def _run(name: str, probe: Probe) -> Finding:
    try:
        return probe()
    except Exception as error:
        reason = _shortened(f"{type(error).__name__}: {error}")
        return Finding((f"{name}: unknown ({reason})",), {"error": reason})


def versions() -> Finding:
    """Returns the versions of bertjax, Python, the operating system and the main packages."""
    of_packages = {name: _version(*(TENSORFLOW if name == "tensorflow" else (name,))) for name in PACKAGES}
    data = {
        "bertjax": importlib.import_module("bertjax").__version__,
        "folder": str(pathlib.Path(__file__).parents[2]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
    }
    lines = (
        "bertjax {bertjax} in {folder}".format(**data),
        "Python {python} ({executable}) on {system}".format(**data),
        ", ".join(f"{name} {version or 'is not installed'}" for name, version in of_packages.items()),
    )
    return Finding(lines, data | of_packages)


def _version(*names: str) -> str | None:
    """Returns the version of the first package that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


class Hardware(NamedTuple):
    """The accelerators of this machine, and the installed software for them."""

    nvidia: bool
    tpu: bool
    cuda_plugin: bool
    libtpu: bool

    @classmethod
    def here(cls) -> "Hardware":
        """Looks at the devices of the operating system, without JAX."""
        is_windows_subsystem = os.path.exists("/dev/dxg") and shutil.which("nvidia-smi") is not None
        return cls(
            nvidia=bool(glob.glob("/dev/nvidia[0-9]*")) or is_windows_subsystem,
            tpu=any(map(glob.glob, ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"))),
            cuda_plugin=any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
            libtpu=importlib.util.find_spec("libtpu") is not None,
        )


def find_devices() -> Finding:
    """Returns the devices that JAX lists, and the accelerators that JAX does not see."""
    hardware, variables = Hardware.here(), {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if hardware.libtpu and not topology.has_accelerator():  # libtpu would look for a TPU in the network
        variables.setdefault("JAX_PLATFORMS", "cpu")
    output, warnings, reason = _run_python(LIST_DEVICES, variables)
    if reason:
        fix = f"{REINSTALL} jax jaxlib, end other programs that use the device, or set JAX_PLATFORMS=cpu"
        return Finding((f"devices: unknown ({reason})",), {"error": reason}, (Problem("JAX lists no devices", fix),))
    data = json.loads(output.splitlines()[-1])
    platforms = {device["platform"] for device in data}
    counts = Counter((device["kind"], device["platform"], device["memory"]) for device in data)
    shown = (
        f"{count} x {kind} ({name})" + (f" with {_amount(memory)} for JAX" if memory else "")
        for (kind, name, memory), count in counts.items()
    )
    problems = accelerator_problems(platforms, hardware, variables.get("JAX_PLATFORMS", ""), warnings)
    return Finding((f"devices: {', '.join(shown)}",), data, tuple(problems))


def accelerator_problems(
    platforms: set[str], hardware: Hardware, jax_platforms: str, warnings: str = ""
) -> Iterator[Problem]:
    """Yields a problem for each accelerator that JAX does not see.

    Args:
      platforms: the platforms of JAX's devices: cpu, gpu, tpu.
      hardware: the accelerators of this machine.
      jax_platforms: the environment variable JAX_PLATFORMS.
      warnings: the lines that JAX has printed.
    """
    gpu_remedy = "run nvidia-smi, unset LD_LIBRARY_PATH and CUDA_VISIBLE_DEVICES"
    kinds = (
        ("gpu", "an NVIDIA GPU", hardware.nvidia, hardware.cuda_plugin, "cuda", "CUDA plugin", gpu_remedy),
        ("tpu", "a TPU", hardware.tpu, hardware.libtpu, "tpu", "libtpu", "end other programs that use the TPU"),
    )
    for name, shown, is_here, has_software, extra, software, remedy in kinds:
        if not is_here or name in platforms:
            continue
        text = f"this machine has {shown}"
        if jax_platforms and not {name, extra} & set(jax_platforms.split(",")):
            yield Problem(f"{text}, and JAX_PLATFORMS={jax_platforms} hides it", "unset JAX_PLATFORMS")
        elif not has_software:
            yield Problem(f"{text}, and JAX has no {software}", _install(extra))
        else:
            lines = [line for line in warnings.splitlines() if extra in line.lower()]
            reason = f" ({_shortened(lines[-1])})" if lines else ""
            yield Problem(f"{text}, and JAX does not see it{reason}", f"{remedy}, or {_install(extra, REINSTALL)}")


def libtpu() -> Finding:
    """Returns whether libtpu, which runs programs on TPUs and compiles for them, loads."""
    version = _version("libtpu")
    if version is None:
        return Finding(("libtpu: not installed",), None)
    _, _, reason = _run_python(LOAD_LIBTPU, os.environ)
    data = {"version": version, "error": reason}
    if not reason:
        return Finding((f"libtpu: {version}, which loads",), data)
    problem = Problem(f"libtpu {version} does not load ({reason})", _install("tpu", REINSTALL))
    return Finding((f"libtpu: {version}, which does not load",), data, (problem,))


def host() -> Finding:
    """Returns the cores and the memory that this process may use."""
    data = {"cores": topology.available_cores(), "memory": int(topology.host_memory())}
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        sizes = dict(line.split(":") for line in file)
        data["available"] = min(1024 * int(sizes["MemAvailable"].split()[0]), data["memory"])
    free = f", {_amount(data['available'])} of it available" if "available" in data else ""
    return Finding((f"host: {data['cores']} cores, {_amount(data['memory'])} memory{free}",), data)


def environment() -> Finding:
    """Returns the environment variables that change what JAX and the libraries do."""
    data = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    shown = ", ".join(f"{name}={_shortened(value)}" for name, value in data.items())
    return Finding((f"environment: {shown or 'no variable of JAX is set'}",), data)


def cached() -> Finding:
    """Returns the folders of the caches with their sizes, and the caches that cannot be written."""
    data, shown, problems = [], [], []
    for cache in caches.caches():
        size, is_whole = _size(cache.folder)
        is_writable = "://" in cache.folder or _is_writable(cache.folder)
        data.append({"name": cache.name, "folder": cache.folder, "bytes": size, "writable": is_writable})
        amount = "missing" if size is None else f"{'' if is_whole else 'more than '}{_amount(size)}"
        shown.append(f"{cache.name} in {cache.folder} ({amount})")
        if not is_writable:
            fix = f"make it a folder that you may write to, or set {cache.variable}=FOLDER"
            problems.append(Problem(f"the cache {cache.folder} cannot be written", fix))
    compiled, *downloads = shown
    return Finding((f"caches: {compiled}", f"downloads: {', '.join(downloads)}"), data, tuple(problems))


def _size(folder: str) -> tuple[int | None, bool]:
    """Returns the bytes in a folder (None for a missing folder), and whether `WALK_SECONDS` sufficed for all files."""
    if not os.path.isdir(folder):
        return None, True
    total, deadline = 0, time.monotonic() + WALK_SECONDS
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
        if time.monotonic() > deadline:
            return total, False
    return total, True


def _is_writable(folder: str) -> bool:
    """Returns whether a folder may be written, or may be created."""
    path = pathlib.Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def disk() -> Finding:
    """Returns the free disk in the current folder and in the folder of temporary files."""
    folders = {"current folder": os.getcwd(), "temporary folder": tempfile.gettempdir()}
    free = {name: shutil.disk_usage(path).free for name, path in folders.items()}
    data = [{"name": name, "folder": path, "free": free[name]} for name, path in folders.items()]
    shown = (f"{_amount(free[name])} in the {name} {path}" for name, path in folders.items())
    problems = (
        Problem(f"only {_amount(free[name])} is free in {path}", "delete files there, or use another disk")
        for name, path in folders.items()
        if free[name] < LITTLE
    )
    return Finding((f"free disk: {', '.join(shown)}",), data, tuple(problems))


class Unmet(NamedTuple):
    """A requirement that is not met: the package, its version (None: not installed), and the versions that fit."""

    name: str
    version: str | None
    wanted: str

    def describe(self) -> str:
        """Returns the problem as text."""
        state = f"{self.version} does not fit" if self.version else "is not installed"
        return f"{self.name} {state}, expected {self.wanted or 'any version'}"


def packages() -> Finding:
    """Returns which required packages and which extras of setup.py are installed, by the metadata of bertjax."""
    if _version("bertjax") is None:
        problem = Problem("bertjax is not installed with pip", CHECKOUT)
        return Finding(("packages: unknown (bertjax has no metadata)",), {"error": problem.text}, (problem,))
    required = [*_unmet_of("bertjax"), *_unmet_of("jax")]
    names = importlib.metadata.metadata("bertjax").get_all("Provides-Extra", ())
    extras = {name: list(_unmet_of("bertjax", name)) for name in names}
    fixes = dict.fromkeys(required, CHECKOUT)
    for extra, unmet_of_extra in extras.items():
        for unmet in unmet_of_extra:
            if unmet.version:
                fixes.setdefault(unmet, _install(extra))
    complete = ", ".join(name for name, unmet in extras.items() if not unmet) or "none"
    missing = ", ".join(f"{extra} ({', '.join(x.name for x in unmet)})" for extra, unmet in extras.items() if unmet)
    lines = (
        f"optional packages: complete for the extras {complete}",
        f"missing for the extras {missing}; {_install('EXTRA')}" if missing else "no optional package is missing",
    )
    data = {
        "required": [unmet._asdict() for unmet in required],
        "extras": {extra: [x._asdict() for x in unmet] for extra, unmet in extras.items()},
    }
    return Finding(lines, data, tuple(Problem(unmet.describe(), fix) for unmet, fix in fixes.items()))


def _unmet_of(name: str, extra: str = "") -> Iterator[Unmet]:
    """Yields the unmet requirements of an extra of a package; if `extra` is "", of the package without extras."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
        always, with_extra = (
            requirement.marker is None or requirement.marker.evaluate({"extra": x}) for x in ("", extra)
        )
        if not with_extra or (extra and always):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield Unmet(requirement.name, version, str(requirement.specifier))
        else:
            inner = (_unmet_of(requirement.name, inner_extra) for inner_extra in sorted(requirement.extras))
            yield from itertools.chain.from_iterable(inner)


def _install(extra: str, pip: str = "pip install") -> str:
    return f"{pip} 'bertjax[{extra}]', in a checkout {pip} -e '.[{extra}]'"


def _run_python(program: str, environment: Mapping[str, str]) -> tuple[str, str, str]:
    """Runs a program in another process; returns stdout, stderr, and the reason of a failure ("" without one)."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", program], env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", "", f"no answer within {SECONDS:g} seconds"
    lines = result.stderr.strip().splitlines()
    last = lines[-1] if lines else f"exit status {result.returncode}"
    return result.stdout, result.stderr, _shortened(last) if result.returncode else ""


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def _amount(count: float) -> str:
    factor, unit = next(((f, u) for f, u in ((1e9, "GB"), (1e6, "MB")) if count >= f), (1e3, "kB"))
    return f"{count / factor:,.1f} {unit}"


PROBES: dict[str, Probe] = {
    "versions": versions,
    "devices": find_devices,
    "libtpu": libtpu,
    "host": host,
    "environment": environment,
    "caches": cached,
    "disk": disk,
    "packages": packages,
}

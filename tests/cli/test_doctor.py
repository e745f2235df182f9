"""`bertjax doctor`: the report about an installation, including missing or broken packages."""

import json
import subprocess
import sys

import pytest

from bertjax import __version__
from bertjax.launch import doctor
from bertjax.launch.doctor import Diagnosis, Finding, Hardware, Problem
from tests.processes import ROOT, environment_with, run


def test_the_command_describes_this_machine(tmp_path):
    result = run("doctor", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"bertjax {__version__} in ") and len(lines) <= doctor.MOST_LINES
    assert "devices: 1 x cpu (cpu)" in lines
    beginnings = "Python 3.", "jax ", "libtpu: ", "host: ", "environment: ", "caches: ", "downloads: ", "free disk: "
    for beginning in (*beginnings, "optional packages: complete for the extras ", "problem"):
        assert any(line.startswith(beginning) for line in lines), beginning
    refused = run("doctor", "all", cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr == "error: unexpected argument 'all'; doctor takes --json only\n"


def test_broken_packages_are_reported_and_not_raised(tmp_path):
    """All commands except `doctor` need absl."""
    for name in ("absl", "jax"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is broken')\n")
    environment = environment_with(PYTHONPATH=f"{tmp_path}:{ROOT}")
    command = [sys.executable, "-m", "bertjax", "doctor", "--json"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stderr == ""
    report = json.loads(result.stdout)
    assert report["commands"] == {"error": "ImportError: absl is broken"}
    assert report["devices"] == {"error": "ImportError: jax is broken"}
    assert report["versions"]["bertjax"] == __version__ and report["host"]["cores"] > 0
    assert "JAX lists no devices" in [problem["text"] for problem in report["problems"]]


def test_a_failed_probe_is_reported_with_the_reason():
    def fails():
        raise OSError("no\nsuch disk")

    diagnosis = doctor.diagnose({"disk": fails, "environment": doctor.environment})
    assert diagnosis.lines()[0] == "disk: unknown (OSError: no such disk)"
    assert diagnosis.lines()[1].startswith("environment: ") and diagnosis.lines()[-1] == "problems: none"
    report = json.loads(json.dumps(diagnosis.as_json()))
    assert report["disk"] == {"error": "OSError: no such disk"} and report["problems"] == []


@pytest.mark.parametrize("count, last", [
    (17, "problem: 16 is broken; fix: repair it"),
    (18, "problem: 2 more, which --json lists"),
    (40, "problem: 24 more, which --json lists"),
])  # fmt: skip
def test_the_report_has_at_most_twenty_lines(count, last):
    problems = tuple(Problem(f"{i} is\nbroken", "repair it") for i in range(count))
    diagnosis = Diagnosis({"host": Finding(("a", "b", "c"), {}, problems)})
    lines = diagnosis.lines()
    assert lines[-1] == last and len(lines) == 20 and not any("\n" in line for line in lines)
    assert len(diagnosis.as_json()["problems"]) == count


NOTHING = Hardware(nvidia=False, tpu=False, cuda_plugin=False, libtpu=False)
NVIDIA, TPU = NOTHING._replace(nvidia=True), NOTHING._replace(tpu=True)
REFUSED = "Unable to initialize backend 'cuda': no driver"


@pytest.mark.parametrize("hardware, platforms, jax_platforms, warnings, text, fix", [
    (NVIDIA, {"cpu"}, "", "", "an NVIDIA GPU, and JAX has no CUDA plugin", "pip install 'bertjax[cuda]'"),
    (NVIDIA._replace(cuda_plugin=True), {"cpu"}, "", REFUSED, f"JAX does not see it ({REFUSED})", "run nvidia-smi"),
    (NVIDIA, {"cpu"}, "cpu", "", "and JAX_PLATFORMS=cpu hides it", "unset JAX_PLATFORMS"),
    (TPU, {"cpu"}, "", "", "this machine has a TPU, and JAX has no libtpu", "pip install 'bertjax[tpu]'"),
    (TPU._replace(libtpu=True), {"cpu"}, "tpu,cpu", "", "and JAX does not see it", "end other programs"),
])  # fmt: skip
def test_accelerators_without_software_are_problems(hardware, platforms, jax_platforms, warnings, text, fix):
    (problem,) = doctor.accelerator_problems(platforms, hardware, jax_platforms, warnings)
    assert text in problem.text and problem.fix.startswith(fix)
    assert not [*doctor.accelerator_problems({"gpu", "tpu"}, hardware, jax_platforms)]


def test_extras_are_read_from_the_metadata(tmp_path, monkeypatch):
    lines = ["Metadata-Version: 2.1", "Name: bertjax", "Version: 9", "Requires-Dist: no-such-package>=1",
             "Requires-Dist: numpy>=99", "Requires-Dist: no-windows; python_version < '3'", "Provides-Extra: whole",
             "Requires-Dist: packaging; extra == 'whole'", "Provides-Extra: part",
             "Requires-Dist: absent[more]; extra == 'part'", "Requires-Dist: packaging<1; extra == 'part'"]  # fmt: skip
    (tmp_path / "bertjax-9.dist-info").mkdir()
    (tmp_path / "bertjax-9.dist-info/METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    finding = doctor.packages()
    assert finding.lines[0] == "optional packages: complete for the extras whole"
    assert finding.lines[1].startswith("missing for the extras part (absent, packaging); pip install 'bertjax[EXTRA]'")
    missing, old, extra = finding.problems
    assert missing == ("no-such-package is not installed, expected >=1", doctor.CHECKOUT)
    assert old.text.startswith("numpy ") and old.text.endswith(" does not fit, expected >=99")
    assert extra.text.startswith("packaging ") and extra.fix.startswith("pip install 'bertjax[part]'")


def test_caches_are_measured_and_must_be_writable(tmp_path, monkeypatch):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/model").write_bytes(bytes(3000))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "hub/model/compiled"))
    finding = doctor.cached()
    assert f"models of the hub in {tmp_path}/hub (3.0 kB)" in finding.lines[1]
    (problem,) = (problem for problem in finding.problems if "JAX_COMPILATION_CACHE_DIR" in problem.fix)
    assert problem.text == f"the cache {tmp_path}/hub/model/compiled cannot be written"


def test_a_library_that_does_not_load_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "1.2")
    monkeypatch.setattr(doctor, "LOAD_LIBTPU", "import sys; sys.exit('libtpu.so: wrong machine')")
    (problem,) = doctor.libtpu().problems
    assert problem.text == "libtpu 1.2 does not load (libtpu.so: wrong machine)"
    monkeypatch.setattr(doctor, "SECONDS", 0.2)
    monkeypatch.setattr(doctor, "LOAD_LIBTPU", "import time; time.sleep(60)")
    assert doctor.libtpu().data == {"version": "1.2", "error": "no answer within 0.2 seconds"}

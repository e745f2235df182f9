"""A gcloud that records every call and fakes TPU VMs: what is sent to a worker is run by bash, in a home of its own.

`install` puts it into a folder. answers.json there holds, by what is asked (create, queue, node, status, ...), the
answers to give one after the other: a text to print, or [exit code, text on stderr]. After the last, all is well.
"""

import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

STUB = pathlib.Path(__file__).parent
WORKERS = 2
UV = """#!/bin/bash
[ "$1" != venv ] || { mkdir -p venv/bin && cp "$STUB/python" venv/bin/python; }
"""
PYTHON = """#!/bin/bash
case "$1 $2" in
  "-m pip") mkdir -p ~/.local/bin && cp "$STUB/uv" ~/.local/bin/uv ;;
  "-m bertjax.main")
    printf '%s\\n' "$@" >~/arguments
    trap 'echo saved; exit 130' TERM
    echo "step 1 of $RUN_DOES"
    while [ "$RUN_DOES" = train ]; do sleep 0.02; done
    $RUN_DOES ;;
  -c*) echo "2 workers, 16 chips" ;;
esac
"""


def take(name):
    """The next scripted answer, or None."""
    with open(STUB / "answers.json", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        answers = json.load(file)
        if not answers.get(name):
            return None
        answer = answers[name].pop(0)
        file.seek(0)
        file.truncate()
        json.dump(answers, file)
    return answer


def give(answer):
    if isinstance(answer, list):
        print(answer[1], file=sys.stderr)
        sys.exit(answer[0])
    print(answer)


def nodes():
    return sorted(STUB.glob("vms/*"))


def preempt():
    for pid in STUB.glob("vms/*/*/bertjax/run.pid"):
        try:
            os.killpg(os.getpgid(int(pid.read_text())), signal.SIGKILL)
        except ProcessLookupError:
            pass


def ssh(node, worker, command):
    if "bertjax/" in command and (answer := take(command.split("worker.sh ")[-1].split()[0])) is not None:
        give(answer)
    environment = dict(os.environ, STUB=str(STUB), PATH=f"{STUB}:{os.environ['PATH']}")
    if " start " in command:
        environment["RUN_DOES"] = take("run") or "train"
    processes = []
    for home in sorted((STUB / "vms" / node).iterdir()):
        if worker in ("all", home.name):
            environment.update(HOME=str(home), HOSTNAME=f"{node}-w-{home.name}")
            processes.append(subprocess.Popen(["bash", "-c", command], cwd=home, env=environment))
    sys.exit(max(process.wait() for process in processes))


def main(words):
    with open(STUB / "calls.jsonl", "a") as file:
        file.write(json.dumps(words) + "\n")
    flags = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    match words:
        case ["compute", "tpus", "queued-resources", "create", name, *_]:
            if (answer := take("create")) is not None:
                give(answer)
            if nodes():
                give([1, f"ERROR: (gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: {name}"])
            count = int(flags.get("--node-count", 1))
            for i in range(count):
                for worker in range(WORKERS):
                    (STUB / "vms" / (name if count == 1 else f"{name}-{i}") / str(worker)).mkdir(parents=True)
        case ["compute", "tpus", "queued-resources", "describe", _, *_]:
            if "failedData" in flags["--format"]:
                give(take("reason") or "")
            elif (answer := take("queue")) is not None:
                if answer in ("SUSPENDED", "FAILED"):
                    preempt()
                give(answer)
            else:
                give("ACTIVE" if nodes() else [1, "ERROR: (gcloud) NOT_FOUND: Resource was not found"])
        case ["compute", "tpus", "queued-resources", "delete", _, *_]:
            if not nodes():
                give([1, "ERROR: (gcloud) NOT_FOUND: Resource was not found"])
            preempt()
            shutil.rmtree(STUB / "vms")
        case ["compute", "tpus", "tpu-vm", "describe", _, *_]:
            give(take("node") or "READY")
        case ["compute", "tpus", "tpu-vm", "scp", source, target, *_]:
            node, _, path = target.partition(":")
            for home in (STUB / "vms" / node).iterdir():
                shutil.copy(source, home / path)
        case ["compute", "tpus", "tpu-vm", "ssh", node, *_]:
            ssh(node, flags["--worker"], flags["--command"])
        case ["storage", "ls", _, *_]:
            give(take("checkpoints") or [1, "ERROR: (gcloud.storage.ls) One or more URLs matched no objects."])
        case _:
            sys.exit(f"the stub does not know: {words}")


def install(folder):
    """Puts gcloud, and the fakes that the workers find, into a new folder."""
    folder.mkdir()
    gcloud = f"#!{sys.executable} -S\n{pathlib.Path(__file__).read_text()}"
    for name, text in ("gcloud", gcloud), ("uv", UV), ("python", PYTHON), ("python3", PYTHON):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


if __name__ == "__main__":
    main(sys.argv[1:])

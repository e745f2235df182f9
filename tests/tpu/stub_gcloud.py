"""A fake gcloud for TPU VMs: bash runs the commands for a worker, in a separate home folder per worker."""

import os
import pathlib
import shlex
import shutil
import signal
import socketserver
import subprocess
import threading

WORKERS = 2
GCLOUD = """#!/bin/bash
exec 4<>/dev/tcp/127.0.0.1/{port}
{{ echo $#; printf '%s\\0' "$@"; }} >&4
eval "$(cat <&4)"
"""
UV = """#!/bin/bash
[ "$1" != venv ] || { mkdir -p venv/bin && cp "$STUB/python3" venv/bin/python; }
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
DONE = 0, "", ""
SLEEP = """#!/bin/bash
exec /bin/sleep 0.02
"""


class Request(socketserver.StreamRequestHandler):
    """Reads the arguments of a call, and answers with a line of bash."""

    def handle(self):
        count, words = int(self.rfile.readline()), b""
        while words.count(b"\0") < count:
            words += self.rfile.read1()
        answer = self.server.answer(words.decode().split("\0")[:-1])
        match answer:
            case str():
                answer = 0, f"{answer}\n", ""
            case (code, error):
                answer = code, "", f"{error}\n"
        code, out, error = answer
        answer = f"printf %s {shlex.quote(out)}; printf %s {shlex.quote(error)} >&2; exit {code}"
        self.wfile.write(answer.encode())


class Stub(socketserver.ThreadingTCPServer):
    """Serves the calls of gcloud, whose folder has to be in PATH.

    Attributes:
      calls: the arguments of each call.
      answers: by the subject (create, queue, node, status, ...), the answers to give one after the other: a text to
        print, or (exit code, text on stderr). After the last answer, all is well.
    """

    def __init__(self, folder: pathlib.Path):
        super().__init__(("127.0.0.1", 0), Request)
        self.folder, self.calls, self.answers, self.lock = folder, [], {}, threading.Lock()
        folder.mkdir()
        gcloud = GCLOUD.format(port=self.server_address[1])
        for name, text in dict(gcloud=gcloud, uv=UV, python3=PYTHON, sleep=SLEEP).items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def homes(self) -> list[pathlib.Path]:
        return sorted(self.folder.glob("vms/*/*"))

    def take(self, name: str, default=""):
        """Returns the next scripted answer."""
        with self.lock:
            answer = self.answers[name].pop(0) if self.answers.get(name) else None
        return default if answer is None else answer

    def preempt(self):
        for pid in self.folder.glob("vms/*/*/bertjax/run.pid"):
            try:
                os.killpg(os.getpgid(int(pid.read_text())), signal.SIGKILL)
            except ProcessLookupError:
                pass

    def answer(self, words: list[str]) -> str | tuple:
        """Returns a line of stdout; or the exit code and a line of stderr; or the exit code, stdout and stderr."""
        self.calls.append(words)
        flags = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
        missing = (1, "ERROR: (gcloud) NOT_FOUND: Resource was not found")
        match words[0] if words[0] == "storage" else words[3]:
            case "storage":
                return self.take("checkpoints", (1, "ERROR: (gcloud.storage.ls) One or more URLs matched no objects."))
            case "create":
                return self.take("create", None) or self.create(words[4], int(flags.get("--node-count", 1)))
            case "describe" if words[2] == "tpu-vm":
                return self.take("node", "READY")
            case "describe" if "failedData" in flags["--format"]:
                return self.take("reason")
            case "describe":
                state = self.take("queue", "ACTIVE" if self.homes() else missing)
                if state in ("SUSPENDED", "FAILED"):
                    self.preempt()
                return state
            case "delete":
                if not self.homes():
                    return missing
                self.preempt()
                shutil.rmtree(self.folder / "vms")
                return DONE
            case "scp":
                node, _, path = words[5].partition(":")
                for home in (self.folder / "vms" / node).iterdir():
                    shutil.copy(words[4], home / path)
                return DONE
            case "ssh":
                return self.ssh(words[4], flags["--worker"], flags["--command"])
        return 2, f"the stub does not know: {words}"

    def create(self, name: str, count: int):
        if self.homes():
            return 1, f"ERROR: (gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: {name}"
        for i in range(count):
            for worker in range(WORKERS):
                (self.folder / "vms" / (name if count == 1 else f"{name}-{i}") / str(worker)).mkdir(parents=True)
        return DONE

    def ssh(self, node: str, worker: str, command: str):
        verb = command.split("worker.sh ")[-1].split()[0]
        if "bertjax/" in command and (answer := self.take(verb, None)) is not None:
            return answer
        environment = dict(os.environ, STUB=str(self.folder), PATH=f"{self.folder}:{os.environ['PATH']}")
        if " start " in command:
            environment["RUN_DOES"] = self.take("run", "train")
        processes, streams = [], dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for home in sorted((self.folder / "vms" / node).iterdir()):
            if worker in ("all", home.name):
                environment.update(HOME=str(home), HOSTNAME=f"{node}-w-{home.name}")
                processes.append(subprocess.Popen(["bash", "-c", command], cwd=home, env=environment, **streams))
        outputs = [process.communicate() for process in processes]
        code = max(process.returncode for process in processes)
        return code, *map("".join, zip(*outputs))

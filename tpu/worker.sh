#!/usr/bin/env bash
# Runs on a worker, called by the other scripts over ssh. All files are in ~/bertjax:
# code/, venv/, run.log, run.pid, run.exit (the exit code), run.stopped (by stop.sh), run.lock (held while it runs).
#
# Usage: worker.sh install | check | start ARGUMENTS... | status | log LINES | stop|end SECONDS [--force]

set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "error: $HOSTNAME: $*" >&2; exit 1; }

# The kernel releases the lock when its last holder exits, so a stale run.pid from before a reboot does no harm.
running() { ! flock -n -s run.lock true; } # shared, so that concurrent checks do not conflict

install() {
  # The images have Python 3.10. Newer Pythons need PIP_BREAK_SYSTEM_PACKAGES for pip install --user.
  [ -x ~/.local/bin/uv ] || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  [ -x venv/bin/python ] || ~/.local/bin/uv venv --quiet --python 3.12 venv
  ~/.local/bin/uv pip install --quiet --python venv/bin/python -e 'code[tpu]'
}

# Must run on all workers at the same time.
check() {
  cd code
  ../venv/bin/python -c '
import jax
from bertjax.distributed import hosts
number = hosts.join(timeout=300)
assert jax.default_backend() == "tpu", f"no TPU, but {jax.default_backend()}"
if number == 0:
    print(f"{jax.process_count()} workers, {jax.device_count()} chips ({jax.devices()[0].device_kind})")'
}

start() {
  if running; then fail "a run is active here"; fi
  [ -x venv/bin/python ] || fail "not set up"
  rm -f run.pid run.exit run.stopped
  echo "=== $(date -u +%FT%TZ): $*" >>run.log
  # A separate session without the input and output of ssh outlives the connection.
  # shellcheck disable=SC2016
  setsid flock -w 5 run.lock bash -c '
    cd code
    ../venv/bin/python -m bertjax.main "$@" &
    echo $! >../run.pid
    code=0
    wait $! || code=$?
    echo $code >../run.exit' _ "$@" </dev/null >>run.log 2>&1 &
  for _ in $(seq 100); do
    [ ! -s run.pid ] || return 0
    sleep 0.1
  done
  fail "the run does not start"
}

status() {
  local state=new
  if running; then
    state=running
  elif [ -e run.stopped ]; then
    state=stopped
  elif [ -s run.exit ]; then
    state=exit:$(<run.exit)
  elif [ -e run.pid ]; then
    state=vanished # killed, or the machine was rebooted
  fi
  echo "bertjax-worker $HOSTNAME $state"
}

stop() {
  if running; then touch run.stopped; fi # tells keep.sh not to restart the run
  end "$@"
}

end() {
  local i
  running || return 0
  kill -TERM "$(<run.pid)" || true
  for ((i = 0; i < $1 * 10; i++)); do
    running || return 0
    sleep 0.1
  done
  [ "${2:-}" = --force ] || fail "the run has not stopped after $1 seconds"
  kill -KILL "$(<run.pid)" || true
  flock --wait 10 run.lock true # wait for the surrounding shell to write run.exit
}

log() { tail -n "$1" run.log | sed "s/^/$HOSTNAME: /"; }

"$@"

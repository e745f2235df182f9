#!/usr/bin/env bash
# What happens on a worker; the other scripts call it there over ssh. Everything lies in ~/bertjax:
# code/, venv/, run.log, run.pid, run.exit (the exit code), run.stopped (by stop.sh), run.lock (held while it runs).
#
# Usage: worker.sh install | check | start ARGUMENTS... | status | log LINES | stop|end SECONDS [--force]

set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "error: $HOSTNAME: $*" >&2; exit 1; }

# The lock goes with its last holder, however that ends, so that a process number of before a reboot misleads nobody.
running() { ! flock -n -s run.lock true; } # shared: two who look do not see each other

install() {
  # The images carry Python 3.10. Newer ones let pip install for the user only when told so.
  [ -x ~/.local/bin/uv ] || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  [ -x venv/bin/python ] || ~/.local/bin/uv venv --quiet --python 3.12 venv
  ~/.local/bin/uv pip install --quiet --python venv/bin/python -e 'code[tpu]'
}

# All workers must do this at the same time.
check() {
  cd code
  ../venv/bin/python -c '
import jax
from bertjax.sharding import hosts
number = hosts.join(timeout=300)
assert jax.default_backend() == "tpu", f"no TPU, but {jax.default_backend()}"
if number == 0:
    print(f"{jax.process_count()} workers, {jax.device_count()} chips ({jax.devices()[0].device_kind})")'
}

start() {
  if running; then fail "a run is going on here"; fi
  [ -x venv/bin/python ] || fail "not set up"
  rm -f run.pid run.exit run.stopped
  echo "=== $(date -u +%FT%TZ): $*" >>run.log
  # In a session of its own, without our input and output, it outlives the connection.
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
    state=vanished # killed, or the machine was started again
  fi
  echo "bertjax-worker $HOSTNAME $state"
}

stop() {
  if running; then touch run.stopped; fi # the user's wish, which keep.sh heeds
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
  [ "${2:-}" = --force ] || fail "the run has not ended after $1 seconds"
  kill -KILL "$(<run.pid)" || true
  flock --wait 10 run.lock true # the shell around it writes run.exit
}

log() { tail -n "$1" run.log | sed "s/^/$HOSTNAME: /"; }

"$@"

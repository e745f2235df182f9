# shellcheck shell=bash disable=SC2034 # what is set here is read elsewhere
# What the scripts share: flags, messages, and the few ways in which they call gcloud. Not a command.

set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=env.sh
source "$HERE/env.sh"
WORKDIR="${BUCKET%/}/runs/$RUN"
TEMPORARY=$(mktemp -d)
trap 'rm -rf "$TEMPORARY"' EXIT
exec 3>&1 # where commands are shown, also from inside $(...)
: "${DRY_RUN:=}"

say() { [ -n "$DRY_RUN" ] || echo "$(date '+%F %T') $TPU_NAME: $*"; }
error() { echo "error: $*" >&2; }
die() { error "$@"; exit 1; }

# parse "--flags --of this --script" "$@": sets DRY_RUN, FLAGS and ARGS (what comes after --, where that is allowed).
parse() {
  local allowed=" --dry-run $1 "
  shift
  FLAGS=" " ARGS=()
  while [ $# -gt 0 ]; do
    case $1 in --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;; esac # the comment at the top
    case $allowed in *" $1 "*) ;; *) die "unknown argument $1; ${0##*/} --help says what there is" ;; esac
    case $1 in
      --) shift; ARGS=("$@"); break ;;
      --dry-run) export DRY_RUN=1 ;;
      *) FLAGS="$FLAGS$1 " ;;
    esac
    shift
  done
}

flag() { case $FLAGS in *" $1 "*) ;; *) return 1 ;; esac; }

# require NAME...: of what must be set in env.sh; checks the rest of it as well.
require() {
  local name
  for name in "$@"; do
    [ -n "${!name}" ] || die "$name is not set: set it in tpu/env.sh, or in the environment"
    case $name=${!name} in
      BUCKET=gs://?* | RECORDS=gs://?*) ;;
      BUCKET=* | RECORDS=*) die "$name=${!name}: must be a path that all workers see: gs://..." ;;
    esac
  done
  case $SLICES in *[!0-9]* | '' | 0*) die "SLICES=$SLICES: must be a number, 1 or more" ;; esac
  [ -n "$DRY_RUN" ] || command -v gcloud >/dev/null ||
    die "gcloud is not installed: see https://cloud.google.com/sdk/docs/install"
}

# quote WORD...: as a shell reads them back.
quote() {
  local word space=
  for word in "$@"; do
    printf '%s' "$space"
    case $word in
      '' | *[!A-Za-z0-9_=/:.,@%+-]*) printf "'%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")" ;;
      *) printf '%s' "$word" ;;
    esac
    space=' '
  done
}

# ask COMMAND...: runs it; with --dry-run shows it instead. run: shows it in either case.
ask() { if [ -n "$DRY_RUN" ]; then show "$@"; else "$@"; fi; }
run() { show "$@"; [ -n "$DRY_RUN" ] || "$@"; }
show() { { [ -n "$DRY_RUN" ] || printf '+ '; quote "$@"; echo; } >&3; }

# tpus ask|run ARGUMENTS...: gcloud compute tpus ARGUMENTS, in our zone and project.
tpus() {
  local how=$1
  shift
  "$how" gcloud compute tpus "$@" --zone="$ZONE" ${PROJECT:+"--project=$PROJECT"} --quiet
}

nodes() {
  local i
  if [ "$SLICES" = 1 ]; then echo "$TPU_NAME"; return; fi
  for ((i = 0; i < SLICES; i++)); do echo "$TPU_NAME-$i"; done
}

# on_node ask|run NODE WORKER COMMAND
on_node() {
  # A VM that is taken away closes no connection: without these, ssh would wait for it for hours.
  # shellcheck disable=SC2086 # several flags
  tpus "$1" tpu-vm ssh "$2" --worker="$3" --command="$4" \
    --ssh-flag=-oConnectTimeout=30 --ssh-flag=-oServerAliveInterval=15 $SSH_FLAGS </dev/null
}

# on_workers ask|run COMMAND: on all workers at the same time. Fails where one cannot be reached or the command fails.
on_workers() {
  local node jobs='' job status=0
  for node in $(nodes); do
    if [ -n "$DRY_RUN" ]; then on_node "$1" "$node" all "$2"; continue; fi
    on_node "$1" "$node" all "$2" &
    jobs="$jobs $!"
  done
  for job in $jobs; do wait "$job" || status=$?; done
  return "$status"
}

# worker ask|run ARGUMENTS...: worker.sh ARGUMENTS on all workers.
worker() {
  local how=$1
  shift
  on_workers "$how" "bash bertjax/code/tpu/worker.sh $(quote "$@")"
}

# The different states of the workers' runs (worker.sh, status), such as "exit:0 running". Fails where a worker is lost.
worker_states() {
  local lines
  # shellcheck disable=SC2016 # the worker's name; where worker.sh is missing, the VM is new
  lines=$(on_workers ask 'bash bertjax/code/tpu/worker.sh status 2>/dev/null || echo "bertjax-worker $HOSTNAME new"') ||
    return 1
  awk '$1 == "bertjax-worker" { print $3 }' <<<"$lines" | sort -u | tr '\n' ' ' | sed 's/ $//'
}

refuse_while_running() {
  local states
  states=$(worker_states 2>"$TEMPORARY/errors") ||
    die "not all workers of $TPU_NAME can be reached: $(last_line); tpu/watch.sh --once says how it is"
  case " $states " in
    *" running "*) die "a run is going on on $TPU_NAME: follow it with tpu/watch.sh, end it with tpu/stop.sh" ;;
  esac
}

# What gcloud had to say, in one line.
last_line() { grep -E 'ERROR|error|failed' "$TEMPORARY/errors" | tail -n 1 || tail -n 1 "$TEMPORARY/errors"; }

# describe KIND NAME FORMAT: one value; NONE where there is no such thing. Fails, in one line, where gcloud cannot tell.
describe() {
  local attempt
  for attempt in 1 2 3 4; do # networks come and go
    tpus ask "$1" describe "$2" --format="value($3)" 2>"$TEMPORARY/errors" && return
    case $(<"$TEMPORARY/errors") in
      *NOT_FOUND* | *"not found"*) echo NONE; return ;;
      *PERMISSION_DENIED* | *"auth login"*) break ;;
    esac
    sleep $((RETRY_SECONDS * attempt))
  done
  error "the state of $2 cannot be read: $(last_line)"
  return 1
}

queue_state() { describe queued-resources "$TPU_NAME" state.state; }

node_states() {
  local node
  for node in $(nodes); do describe tpu-vm "$node" state || echo '?'; done | sort -u | tr '\n' ' ' | sed 's/ $//'
}

# pack FILE: the code as it is now, changes included.
pack() {
  COPYFILE_DISABLE=1 ask tar -czf "$1" --exclude=__pycache__ -C "${HERE%/*}" \
    README.md pyproject.toml setup.py bertjax experiments tpu
}

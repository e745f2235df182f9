# shellcheck shell=bash disable=SC2034 # variables set here are read by the scripts
# Shared code of the scripts: flags, messages, and gcloud calls. Not a command.

set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=env.sh
source "$HERE/env.sh"
WORKDIR="${BUCKET%/}/runs/$RUN"
TEMPORARY=$(mktemp -d)
trap 'rm -rf "$TEMPORARY"' EXIT
exec 3>&1 # for printing commands, also from inside $(...)
: "${DRY_RUN:=}"

say() { [ -n "$DRY_RUN" ] || echo "$(date '+%F %T') $TPU_NAME: $*"; }
error() { echo "error: $*" >&2; }
die() { error "$@"; exit 1; }

# parse "--flags --of --this --script" "$@": sets DRY_RUN, FLAGS and, if -- is allowed, ARGS (the arguments after --).
parse() {
  local allowed=" --dry-run $1 "
  shift
  FLAGS=" " ARGS=()
  while [ $# -gt 0 ]; do
    case $1 in --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;; esac # the comment at the top
    case $allowed in *" $1 "*) ;; *) die "unknown argument $1; see ${0##*/} --help" ;; esac
    case $1 in
      --) shift; ARGS=("$@"); break ;;
      --dry-run) export DRY_RUN=1 ;;
      *) FLAGS="$FLAGS$1 " ;;
    esac
    shift
  done
}

flag() { case $FLAGS in *" $1 "*) ;; *) return 1 ;; esac; }

# require NAME...: fails unless these variables of env.sh are set and valid; also checks SLICES and gcloud.
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

# quote WORD...: quotes words for a shell.
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

# ask COMMAND...: runs the command, or prints it with --dry-run. run COMMAND...: prints the command, and runs it unless
# --dry-run is set.
ask() { if [ -n "$DRY_RUN" ]; then show "$@"; else "$@"; fi; }
run() { show "$@"; [ -n "$DRY_RUN" ] || "$@"; }
show() { { [ -n "$DRY_RUN" ] || printf '+ '; quote "$@"; echo; } >&3; }

# tpus ask|run ARGUMENTS...: gcloud compute tpus ARGUMENTS, in the zone and project of env.sh.
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
  # A preempted VM does not close its connections: without these flags, ssh would wait for hours.
  # shellcheck disable=SC2086 # several flags
  tpus "$1" tpu-vm ssh "$2" --worker="$3" --command="$4" \
    --ssh-flag=-oConnectTimeout=30 --ssh-flag=-oServerAliveInterval=15 $SSH_FLAGS </dev/null
}

# on_workers ask|run COMMAND: runs the command on all workers in parallel. Fails if a worker cannot be reached, or if the
# command fails.
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

# worker ask|run ARGUMENTS...: runs worker.sh ARGUMENTS on all workers.
worker() {
  local how=$1
  shift
  on_workers "$how" "bash bertjax/code/tpu/worker.sh $(quote "$@")"
}

# Prints the distinct states of the workers (worker.sh status), such as "exit:0 running". Fails if a worker is lost.
worker_states() {
  local lines
  # shellcheck disable=SC2016 # $HOSTNAME expands on the worker; a VM without worker.sh is new
  lines=$(on_workers ask 'bash bertjax/code/tpu/worker.sh status 2>/dev/null || echo "bertjax-worker $HOSTNAME new"') ||
    return 1
  awk '$1 == "bertjax-worker" { print $3 }' <<<"$lines" | sort -u | tr '\n' ' ' | sed 's/ $//'
}

refuse_while_running() {
  local states
  states=$(worker_states 2>"$TEMPORARY/errors") ||
    die "not all workers of $TPU_NAME can be reached: $(last_line); tpu/watch.sh --once shows its state"
  case " $states " in
    *" running "*) die "a run is active on $TPU_NAME: follow it with tpu/watch.sh, stop it with tpu/stop.sh" ;;
  esac
}

# Prints gcloud's last error in one line.
last_line() { grep -E 'ERROR|error|failed' "$TEMPORARY/errors" | tail -n 1 || tail -n 1 "$TEMPORARY/errors"; }

# describe KIND NAME FORMAT: prints one value, or NONE if the resource does not exist. Fails with one line if gcloud fails.
describe() {
  local attempt
  for attempt in 1 2 3 4; do # network errors are transient
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

# pack FILE: archives the checkout, including uncommitted changes.
pack() {
  COPYFILE_DISABLE=1 ask tar -czf "$1" --exclude=__pycache__ -C "${HERE%/*}" \
    README.md pyproject.toml setup.py bertjax experiments tpu
}

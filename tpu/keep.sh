#!/usr/bin/env bash
# Trains the run of tpu/env.sh to its end: creates the TPU, sets the TPU up, starts the run, and repeats these steps
# after a preemption. Run keep.sh on a machine that stays awake. keep.sh can be restarted at any time.
#
# Usage: tpu/keep.sh [--delete-when-done] [--dry-run] [-- --config.anything=VALUE ...]
#
# Restarts a failed run up to $MAX_RESTARTS times without a new checkpoint in between. tpu/stop.sh stops both the run
# and keep.sh. All restarts use the code of the start of keep.sh.

source "$(dirname "$0")/common.sh"
parse "--delete-when-done --" "$@"
require ZONE BUCKET RECORDS

export CODE_ARCHIVE=$TEMPORARY/bertjax.tar.gz
pack "$CODE_ARCHIVE"

start() { "$HERE/run.sh" -- ${ARGS[@]+"${ARGS[@]}"}; }
launch() { "$HERE/setup.sh" && start; }
remove() { "$HERE/delete.sh" --yes; }

if [ -n "$DRY_RUN" ]; then # without a TPU: show the first round, and the steps after a preemption
  "$HERE/create.sh"
  launch
  worker_states
  remove
  exit
fi

# Prints the state in one word: none, queued, gone, wait; if the TPU is active: new, running, lost, stopped, done, failed.
look() {
  local states
  case $(queue_state || true) in
    ACTIVE) ;;
    NONE) echo none; return ;;
    FAILED | SUSPENDED) echo gone; return ;;
    SUSPENDING | DELETING | '') echo wait; return ;;
    *) echo queued; return ;;
  esac
  states=$(node_states)
  case " $states " in
    " READY ") ;;
    *PREEMPTED* | *TERMINATED* | *STOPPED* | *UNKNOWN* | *NONE*) echo gone; return ;;
    *) echo wait; return ;;
  esac
  states=$(worker_states 2>/dev/null) || { echo lost; return; }
  case " $states " in
    " running " | " exit:0 running ") echo running ;;
    " running stopped ") echo wait ;;
    *" running "*) echo lost ;; # only some workers run, and wait for the others
    *" stopped "*) echo stopped ;;
    " exit:0 ") echo "done" ;;
    *" new "*) echo new ;;
    *) echo failed ;;
  esac
}

# Exits after too many failures in a row; a new checkpoint resets the count.
failures=0 checkpoints=
count_failure() {
  local now
  now=$(gcloud storage ls "$WORKDIR/checkpoints/" ${PROJECT:+"--project=$PROJECT"} 2>/dev/null) || now=$checkpoints
  if [ "$now" != "$checkpoints" ]; then failures=0; fi
  checkpoints=$now failures=$((failures + 1))
  [ "$failures" -le "$MAX_RESTARTS" ] || die "$RUN failed $failures times without a new checkpoint: $1"
}

create_and_launch() {
  local code=0
  "$HERE/create.sh" || code=$?
  case $code in
    0) launch || count_failure "it could not be started" ;;
    75) ;; # decided at the next check
    *) count_failure "the TPU cannot be created" ;;
  esac
}

before='' misses=0
while :; do
  now=$(look)
  # A run that ended before the start of keep.sh may be another run. A finished run reports this when started again.
  if [ -z "$before" ]; then case $now in "done" | stopped | failed) now=new ;; esac; fi
  [ "$now" = "$before" ] || say "$now"
  before=$now
  [ "$now" = lost ] || misses=0
  case $now in
    none | queued) create_and_launch ;;
    gone) # preempted; it cannot be reused
      if remove; then create_and_launch; fi
      ;;
    new) launch || count_failure "it could not be started" ;;
    lost)
      misses=$((misses + 1))
      if [ "$misses" -ge "$MAX_MISSES" ]; then
        misses=0
        count_failure "a worker is lost"
        worker run end "$STOP_SECONDS" --force || say "a worker does not answer"
        launch || remove || true # if it cannot be restarted, replace the TPU
      fi
      ;;
    failed)
      worker ask log 20 || true
      count_failure "see the log above"
      start || say "could not be started; checking again"
      ;;
    stopped) say "$RUN was stopped by tpu/stop.sh; tpu/run.sh resumes it"; exit ;;
    "done")
      say "$RUN is done: $WORKDIR"
      if flag --delete-when-done; then remove; else say "the TPU still costs money; tpu/delete.sh deletes it"; fi
      exit
      ;;
  esac
  sleep "$POLL_SECONDS"
done

#!/usr/bin/env bash
# Keeps the run of tpu/env.sh going until it is done: creates the TPU, sets it up, starts the run, and does so again
# after a preemption. Leave it running on a machine that stays awake; started again, it takes up what it finds.
#
# Usage: tpu/keep.sh [--delete-when-done] [--dry-run] [-- --config.anything=VALUE ...]
#
# A run that fails is restarted up to $MAX_RESTARTS times without a new checkpoint in between. tpu/stop.sh ends both.
# The code is that of the moment when keep.sh was started.

source "$(dirname "$0")/common.sh"
parse "--delete-when-done --" "$@"
require ZONE BUCKET RECORDS

export CODE_ARCHIVE=$TEMPORARY/bertjax.tar.gz
pack "$CODE_ARCHIVE"

start() { "$HERE/run.sh" -- ${ARGS[@]+"${ARGS[@]}"}; }
launch() { "$HERE/setup.sh" && start; }
remove() { "$HERE/delete.sh" --yes; }

if [ -n "$DRY_RUN" ]; then # without a TPU to look at: the first round, and what follows a preemption
  "$HERE/create.sh"
  launch
  worker_states
  remove
  exit
fi

# One word on how things are: none, queued, gone, wait; and, where the TPU is there: new, running, lost, failed, ...
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
    *" running "*) echo lost ;; # of some workers; the others wait for them
    *" stopped "*) echo stopped ;;
    " exit:0 ") echo "done" ;;
    *" new "*) echo new ;;
    *) echo failed ;;
  esac
}

# Ends after too many failures in a row; a checkpoint between two of them starts the count again.
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
    75) ;; # the next look tells
    *) count_failure "the TPU cannot be created" ;;
  esac
}

before='' misses=0
while :; do
  now=$(look)
  # What ended before we came may have been another run; one that is done says so when it is started again.
  if [ -z "$before" ]; then case $now in "done" | stopped | failed) now=new ;; esac; fi
  [ "$now" = "$before" ] || say "$now"
  before=$now
  [ "$now" = lost ] || misses=0
  case $now in
    none | queued) create_and_launch ;;
    gone) # preempted; nothing of it can be used again
      if remove; then create_and_launch; fi
      ;;
    new) launch || count_failure "it could not be started" ;;
    lost)
      misses=$((misses + 1))
      if [ "$misses" -ge "$MAX_MISSES" ]; then
        misses=0
        count_failure "a worker is lost"
        worker run end "$STOP_SECONDS" --force || say "a worker does not answer"
        launch || remove || true # what cannot be restarted is replaced
      fi
      ;;
    failed)
      worker ask log 20 || true
      count_failure "see the log above"
      start || say "could not be started; looking again"
      ;;
    stopped) say "$RUN was stopped by tpu/stop.sh; tpu/run.sh or keep.sh after it goes on"; exit ;;
    "done")
      say "$RUN is done: $WORKDIR"
      if flag --delete-when-done; then remove; else say "the TPU still costs; tpu/delete.sh removes it"; fi
      exit
      ;;
  esac
  sleep "$POLL_SECONDS"
done

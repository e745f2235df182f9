#!/usr/bin/env bash
# Starts the run of tpu/env.sh on all workers and returns; the run does not need this machine. An earlier run with this
# name resumes from the last checkpoint in $BUCKET/runs/$RUN.
#
# Usage: tpu/run.sh [--dry-run] [-- --config.anything=VALUE ...]

source "$(dirname "$0")/common.sh"
parse "--" "$@"
require ZONE BUCKET RECORDS

refuse_while_running
worker run start "--config=$CONFIG" "--workdir=$WORKDIR" "--config.data.records=$RECORDS" ${ARGS[@]+"${ARGS[@]}"} ||
  die "the run could not be started on all workers of $TPU_NAME (after a failed setup: tpu/setup.sh); stop it with tpu/stop.sh"
say "$RUN is running; tpu/watch.sh follows it"

#!/usr/bin/env bash
# Stops the run on all workers: it saves a checkpoint and ends. The TPU stays, and costs; tpu/delete.sh removes it.
#
# Usage: tpu/stop.sh [--force] [--dry-run]
#
# --force: kills what has not ended after $STOP_SECONDS seconds.

source "$(dirname "$0")/common.sh"
parse "--force" "$@"
require ZONE

force=
if flag --force; then force=--force; fi
worker run stop "$STOP_SECONDS" $force ||
  die "the run may go on on a worker of $TPU_NAME that did not end or cannot be reached; stop.sh --force kills it"

#!/usr/bin/env bash
# Stops the run on all workers; it saves a checkpoint first. The TPU remains and costs money; tpu/delete.sh deletes it.
#
# Usage: tpu/stop.sh [--force] [--dry-run]
#
# --force: kills processes that have not exited after $STOP_SECONDS seconds.

source "$(dirname "$0")/common.sh"
parse "--force" "$@"
require ZONE

force=
if flag --force; then force=--force; fi
worker run stop "$STOP_SECONDS" $force ||
  die "the run may still be active on a worker of $TPU_NAME that did not stop or cannot be reached; stop.sh --force kills it"

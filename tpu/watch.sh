#!/usr/bin/env bash
# Prints the states of the TPU and the run, then follows the first worker's log until Ctrl-C, which does not stop the run.
#
# Usage: tpu/watch.sh [--once] [--dry-run]
#
# --once: prints the last lines of the log and returns.

source "$(dirname "$0")/common.sh"
parse "--once" "$@"
require ZONE

state=$(queue_state)
if [ "$state" != ACTIVE ] && [ -z "$DRY_RUN" ]; then say "$state"; exit; fi
node_states=$(node_states)
workers=$(worker_states) || workers="not all can be reached"
say "$state, nodes: $node_states, run: $workers"
follow=F
if flag --once; then follow=; fi
on_node ask "$(nodes | head -n 1)" 0 "tail -n 30 ${follow:+-$follow }bertjax/run.log"

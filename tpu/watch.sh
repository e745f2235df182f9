#!/usr/bin/env bash
# Shows how the TPU and the run are, then follows the first worker's log until Ctrl-C, which the run does not feel.
#
# Usage: tpu/watch.sh [--once] [--dry-run]
#
# --once: shows the last lines of the log and returns.

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

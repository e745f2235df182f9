#!/usr/bin/env bash
# Copies this checkout to all workers, installs it in a virtual environment, and counts the chips. Can be repeated.
#
# Usage: tpu/setup.sh [--dry-run]
#
# Copies bertjax/, experiments/, tpu/ and the files for pip, or the archive CODE_ARCHIVE=FILE (set by keep.sh).

source "$(dirname "$0")/common.sh"
parse "" "$@"
require ZONE

refuse_while_running
archive=${CODE_ARCHIVE:-}
if [ -z "$archive" ]; then
  archive=$TEMPORARY/bertjax.tar.gz
  pack "$archive"
fi
for node in $(nodes); do
  # shellcheck disable=SC2086 # several flags
  tpus run tpu-vm scp "$archive" "$node:bertjax.tar.gz" --worker=all \
    --scp-flag=-oConnectTimeout=30 --scp-flag=-oServerAliveInterval=15 $SSH_FLAGS ||
    die "the code cannot be copied to $node; if gcloud asks for ssh-add, follow its instructions"
done
on_workers run 'rm -rf bertjax/code && mkdir -p bertjax/code && tar -xzf bertjax.tar.gz -C bertjax/code' ||
  die "the code cannot be unpacked on all workers of $TPU_NAME"
worker run install || die "bertjax cannot be installed on all workers of $TPU_NAME; see above"
worker run check || die "the workers of $TPU_NAME do not find each other or their chips; see above"

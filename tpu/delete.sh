#!/usr/bin/env bash
# Deletes the queued resource and its TPU VMs with their disks. Never touches the bucket.
#
# Usage: tpu/delete.sh [--yes] [--dry-run]
#
# --yes: do not ask for confirmation.

source "$(dirname "$0")/common.sh"
parse "--yes" "$@"
require ZONE

if ! flag --yes && [ -z "$DRY_RUN" ]; then
  printf 'Delete %s in %s, and end all runs on it? [y/N] ' "$TPU_NAME" "$ZONE"
  read -r answer || answer=
  case $answer in y | Y | yes) ;; *) die "not deleted" ;; esac
fi
if ! tpus run queued-resources delete "$TPU_NAME" --force 2>"$TEMPORARY/errors"; then
  case $(<"$TEMPORARY/errors") in
    *NOT_FOUND* | *"not found"*) say "does not exist" ;;
    *) die "$TPU_NAME could not be deleted: $(last_line)" ;;
  esac
fi

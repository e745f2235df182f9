#!/usr/bin/env bash
# Requests the TPU of tpu/env.sh as a queued resource, and waits until it is active.
#
# Usage: tpu/create.sh [--dry-run]
#
# To train BERT-base on a new v5litepod-16, set ZONE, BUCKET and RECORDS in tpu/env.sh and run:
#   tpu/create.sh && tpu/setup.sh && tpu/run.sh
# Ctrl-C stops waiting but keeps the request; run the command again to keep waiting. Exits with 75 if a retry may help.

source "$(dirname "$0")/common.sh"
parse "" "$@"
require ZONE

runtime=$RUNTIME_VERSION
if [ -z "$runtime" ]; then
  case $ACCELERATOR in # https://cloud.google.com/tpu/docs/runtimes
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    v[234]-*) runtime=tpu-ubuntu2204-base ;;
    tpu7x-*) die "ACCELERATOR=$ACCELERATOR: Google offers TPU7x on GKE only; with access to it here, set RUNTIME_VERSION" ;;
    *) die "ACCELERATOR=$ACCELERATOR: unknown; set RUNTIME_VERSION as well (https://cloud.google.com/tpu/docs/runtimes)" ;;
  esac
fi
flags=(--accelerator-type="$ACCELERATOR" --runtime-version="$runtime")
if [ "$SLICES" = 1 ]; then
  flags+=(--node-id="$TPU_NAME")
else
  flags+=(--node-count="$SLICES" --node-prefix="$TPU_NAME")
fi
case $PROVISIONING in
  spot) flags+=(--spot) ;;
  reserved) flags+=(--reserved) ;;
  on-demand) ;;
  *) die "PROVISIONING=$PROVISIONING: choose one of spot, on-demand, reserved" ;;
esac

# explain MESSAGE: exits with one line and a remedy if gcloud's message is about quota or capacity.
explain() {
  case $1 in
    *[Qq]uota*)
      die "the quota for $ACCELERATOR ($PROVISIONING) in $ZONE is too small: request more at" \
        "https://console.cloud.google.com/iam-admin/quotas, or choose another ZONE or ACCELERATOR ($1)"
      ;;
    *capacity* | *RESOURCE_EXHAUSTED* | *"available resources"*)
      error "no capacity for $ACCELERATOR ($PROVISIONING) in $ZONE now: choose another ZONE, or let tpu/keep.sh keep asking ($1)"
      exit 75
      ;;
  esac
}

# shellcheck disable=SC2086 # several flags
if ! tpus run queued-resources create "$TPU_NAME" "${flags[@]}" $CREATE_FLAGS 2>"$TEMPORARY/errors"; then
  case $(<"$TEMPORARY/errors") in
    *ALREADY_EXISTS* | *"already exists"*) say "exists already" ;;
    *) explain "$(last_line)"; die "gcloud could not create $TPU_NAME: $(last_line)" ;;
  esac
fi

before=
while :; do
  state=$(queue_state) || exit 75
  [ -z "$DRY_RUN" ] || exit 0
  [ "$state" = "$before" ] || say "$state"
  before=$state
  case $state in
    ACTIVE) exit ;;
    FAILED)
      reason=$(describe queued-resources "$TPU_NAME" state.failedData.error.message)
      explain "$reason"
      error "$TPU_NAME has failed: ${reason:-no reason given}; remove it with tpu/delete.sh and try again"
      exit 75
      ;;
    SUSPENDING | SUSPENDED)
      error "$TPU_NAME was preempted: remove it with tpu/delete.sh and try again, or use tpu/keep.sh, which does both"
      exit 75
      ;;
    NONE) die "$TPU_NAME was deleted while waiting" ;;
  esac
  sleep "$POLL_SECONDS"
done

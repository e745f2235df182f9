# shellcheck shell=bash disable=SC2034 # read by the other scripts
# Settings of the tpu/ scripts. Edit them here, or override one for a single command: ZONE=us-west4-a tpu/create.sh

: "${ZONE:=}"                      # of the TPU, such as us-west4-a: cloud.google.com/tpu/docs/regions-zones
: "${BUCKET:=}"                    # gs://NAME[/FOLDER]: workdirs are $BUCKET/runs/$RUN; best in the region of ZONE
: "${RECORDS:=}"                   # gs://...: the output of bertjax prepare
: "${CONFIG:=experiments/base.py}" # the experiment, relative to the root of this checkout
: "${RUN:=base}"                   # the run's name; a run with the same name resumes from its last checkpoint

: "${TPU_NAME:=bertjax}"           # of the queued resource and its node; with several, nodes are $TPU_NAME-0, ...
: "${ACCELERATOR:=v5litepod-16}"   # type and size
: "${PROVISIONING:=spot}"          # spot (cheap, may be preempted) | on-demand | reserved
: "${SLICES:=1}"                   # nodes of type ACCELERATOR that train together
: "${RUNTIME_VERSION:=}"           # of the VMs; empty: the default for ACCELERATOR
: "${PROJECT:=}"                   # empty: gcloud's default
: "${CREATE_FLAGS:=}"              # extra flags for gcloud's create, such as --service-account=ADDRESS --internal-ips
: "${SSH_FLAGS:=}"                 # extra flags for gcloud's ssh and scp, such as --internal-ip

: "${POLL_SECONDS:=60}"            # between checks of the TPU's state
: "${RETRY_SECONDS:=5}"            # before a failed gcloud call is retried; grows with each attempt
: "${STOP_SECONDS:=300}"           # for a run to save its checkpoint before --force kills it
: "${MAX_RESTARTS:=3}"             # keep.sh: of a run that keeps failing without a new checkpoint
: "${MAX_MISSES:=3}"               # keep.sh: consecutive checks with a lost worker before the run is restarted

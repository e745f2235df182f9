# shellcheck shell=bash disable=SC2034 # read by the other scripts
# Settings of the tpu/ scripts. Edit them here, or override one for a single command: ZONE=us-west4-a tpu/create.sh

: "${ZONE:=}"                      # zone of the TPU, such as us-west4-a: cloud.google.com/tpu/docs/regions-zones
: "${BUCKET:=}"                    # gs://NAME[/FOLDER], best in the region of ZONE; workdirs are $BUCKET/runs/$RUN
: "${RECORDS:=}"                   # gs://...: the output of bertjax prepare
: "${CONFIG:=experiments/base.py}" # the experiment, relative to the root of this checkout
: "${RUN:=base}"                   # name of the run; a run with the same name resumes from its last checkpoint

: "${TPU_NAME:=bertjax}"           # name of the queued resource and its node; several nodes are $TPU_NAME-0, ...
: "${ACCELERATOR:=v5litepod-16}"   # TPU type and size
: "${PROVISIONING:=spot}"          # spot (cheap, may be preempted) | on-demand | reserved
: "${SLICES:=1}"                   # number of nodes of type ACCELERATOR that train together
: "${RUNTIME_VERSION:=}"           # software version of the VMs; empty: the default for ACCELERATOR
: "${PROJECT:=}"                   # Google Cloud project; empty: gcloud's default
: "${CREATE_FLAGS:=}"              # extra flags for gcloud's create, such as --service-account=ADDRESS --internal-ips
: "${SSH_FLAGS:=}"                 # extra flags for gcloud's ssh and scp, such as --internal-ip

: "${POLL_SECONDS:=60}"            # seconds between checks of the TPU's state
: "${RETRY_SECONDS:=5}"            # seconds before a failed gcloud call is retried; grows with each attempt
: "${STOP_SECONDS:=300}"           # seconds for a run to save its checkpoint before --force kills the run
: "${MAX_RESTARTS:=3}"             # keep.sh: maximum restarts of a failing run without a new checkpoint
: "${MAX_MISSES:=3}"               # keep.sh: consecutive checks with a lost worker before the run is restarted

# shellcheck shell=bash disable=SC2034 # read by the scripts beside it
# The settings of the tpu/ scripts. Edit them here, or override one for a single command: ZONE=us-west4-a tpu/create.sh

: "${ZONE:=}"                      # where the TPU is, such as us-west4-a: cloud.google.com/tpu/docs/regions-zones
: "${BUCKET:=}"                    # gs://NAME[/FOLDER]: runs lie in $BUCKET/runs/$RUN; best in the region of ZONE
: "${RECORDS:=}"                   # gs://...: what python -m bertjax.prepare wrote
: "${CONFIG:=experiments/base.py}" # the experiment, as seen from the root of this checkout
: "${RUN:=base}"                   # the run's name; the same name goes on from its last checkpoint

: "${TPU_NAME:=bertjax}"           # of the queued resource, and of its node (or, with a number behind it, its nodes)
: "${ACCELERATOR:=v5litepod-16}"   # type and size
: "${PROVISIONING:=spot}"          # spot (cheap, may be preempted) | on-demand | reserved
: "${SLICES:=1}"                   # nodes of type ACCELERATOR that train together
: "${RUNTIME_VERSION:=}"           # the VMs' image; empty: the usual one of ACCELERATOR
: "${PROJECT:=}"                   # empty: gcloud's own default
: "${CREATE_FLAGS:=}"              # more for gcloud's create, such as --service-account=ADDRESS --internal-ips
: "${SSH_FLAGS:=}"                 # more for gcloud's ssh and scp, such as --internal-ip

: "${POLL_SECONDS:=60}"            # between two looks at the TPU
: "${RETRY_SECONDS:=5}"            # before a failed gcloud call is tried again; grows with every try
: "${STOP_SECONDS:=300}"           # that a run has to save its checkpoint before --force kills it
: "${MAX_RESTARTS:=3}"             # keep.sh: of a run that fails again and again without a new checkpoint
: "${MAX_MISSES:=3}"               # keep.sh: looks in a row at which a worker is missing before the run is restarted

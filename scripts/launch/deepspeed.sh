#!/usr/bin/env bash
# Several machines that reach one another by ssh, with DeepSpeed's launcher and a hostfile.
#
#   HOSTFILE=hostfile scripts/launch/deepspeed.sh experiment=qwen3_8b_eagle3 run.name=qwen run.root=/shared/outputs
#
# A hostfile has one line per machine:   worker-1 slots=8
# All machines need this environment at the same path, and run.root on a shared file system.
# NCCL variables of the environment (NCCL_SOCKET_IFNAME, ...) are passed on by the launcher when listed in .deepspeed_env.
set -euo pipefail

hostfile="${HOSTFILE:?set HOSTFILE to a file with one \"<host> slots=<gpus>\" line per machine}"
if [[ ! -f "$hostfile" ]]; then
  echo "hostfile '$hostfile' does not exist" >&2
  exit 2
fi
launch=(deepspeed --hostfile "$hostfile" --no_python --no_local_rank)
program="$(command -v headstart)"

"${launch[@]}" "$program" generate "$@"
"${launch[@]}" "$program" train "$@"
headstart measure "$@"
headstart report "$@"

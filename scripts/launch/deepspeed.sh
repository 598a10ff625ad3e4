#!/usr/bin/env bash
# Several machines that reach one another by ssh, with DeepSpeed's launcher and a hostfile.
#
#   HOSTFILE=hostfile scripts/launch/deepspeed.sh experiment=qwen3_8b_eagle3 run.name=qwen run.root=/shared/outputs
#
# A hostfile has one line per machine:   worker-1 slots=8
# More than one machine needs pdsh on the first one, this environment at the same path on all, and run.root on a shared file system.
# NCCL variables of the environment (NCCL_SOCKET_IFNAME, ...) are passed on by the launcher when listed in .deepspeed_env.
# STAGES: what to do, in this order (default: "generate train measure report"). PORT: of the first machine (default: 29500).
# The script is safe to repeat: complete stages are skipped, interrupted ones continue (leave out run.overwrite=true, which starts again).
set -euo pipefail

hostfile="${HOSTFILE:?set HOSTFILE to a file with one \"<host> slots=<gpus>\" line per machine}"
if [[ ! -f "$hostfile" ]]; then
  echo "hostfile '$hostfile' does not exist" >&2
  exit 2
fi
launch=(deepspeed --hostfile "$hostfile" --master_port "${PORT:-29500}" --no_python --no_local_rank)
if (($(grep -cvE '^[[:space:]]*(#|$)' "$hostfile") == 1)); then
  launch+=(--no_ssh_check --master_addr 127.0.0.1) # a single machine is this one
fi
program="$(command -v headstart)"

# A setting that one of the stages does not read is refused before the first one begins.
for stage in ${STAGES:-generate train measure report}; do
  headstart "$stage" "$@" --show >/dev/null
done

for stage in ${STAGES:-generate train measure report}; do
  case "$stage" in
    generate | train) "${launch[@]}" "$program" "$stage" "$@" ;;
    *) headstart "$stage" "$@" ;;
  esac
done

#!/usr/bin/env bash
# One machine, several processes: answers and training over all GPUs, measuring on one.
#
#   scripts/launch/torchrun.sh experiment=llama31_8b_eagle3 run.name=llama
#
# GPUS: processes on this machine (default: all visible GPUs; needed on a machine without any, where it counts CPU processes).
# STAGES: what to do, in this order (default: "generate train measure report").
# RESTARTS: how often a launch in which a process has died begins again by itself, from the newest state (default: 2).
# The script is safe to repeat: complete stages are skipped, interrupted ones continue (leave out run.overwrite=true, which starts again).
set -euo pipefail

# A store of its own for every attempt: torchrun 2.13 shares one, in which a restarted process waits for the dead.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
gpus="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
launch=(torchrun --standalone --nproc-per-node "$gpus" --max-restarts "${RESTARTS:-2}" --no-python)

# A setting that one of the stages does not read is refused before the first one begins.
for stage in ${STAGES:-generate train measure report}; do
  headstart "$stage" "$@" --show >/dev/null
done

for stage in ${STAGES:-generate train measure report}; do
  case "$stage" in
    generate | train) "${launch[@]}" headstart "$stage" "$@" ;;
    *) headstart "$stage" "$@" ;;
  esac
done

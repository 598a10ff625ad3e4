#!/usr/bin/env bash
# One machine, several GPUs: answers and training over all of them, measuring on one.
#
#   scripts/launch/torchrun.sh experiment=llama31_8b_eagle3 run.name=llama
#
# GPUS: number of processes per machine (default: all visible GPUs).
# The script is safe to repeat: complete stages are skipped, interrupted ones continue.
set -euo pipefail

gpus="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
launch=(torchrun --standalone --nproc-per-node "$gpus" --no-python)

"${launch[@]}" headstart generate "$@"
"${launch[@]}" headstart train "$@"
headstart measure "$@"
headstart report "$@"

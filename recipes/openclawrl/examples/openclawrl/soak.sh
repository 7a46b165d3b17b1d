#!/usr/bin/env bash
# 500 trained turns of one user who keeps talking: soak.sh [SEED]. Stopped and started again it goes on.
set -euo pipefail
export OMP_NUM_THREADS=1
exec nice -n 15 python -m recipes.openclawrl.examples.openclawrl.study run \
    --arms f --seeds "${1:-0}" --sessions 900 --trained 500

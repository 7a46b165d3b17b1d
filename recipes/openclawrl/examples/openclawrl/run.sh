#!/usr/bin/env bash
# The example as one command: run.sh [SESSIONS] [SEED] [OUT]. An interrupted run in OUT goes on.
set -euo pipefail
sessions="${1:-36}"
seed="${2:-0}"
out="${3:-runs/demo-$sessions-seed$seed}"
exec reef demo --sessions "$sessions" --seed "$seed" --out "$out"

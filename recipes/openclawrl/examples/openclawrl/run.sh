#!/usr/bin/env bash
# The example as one command: run.sh [SESSIONS] [SEED] [OUT]. An interrupted run in OUT goes on.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
sessions="${1:-36}"
seed="${2:-0}"
out="${3:-$here/results/run-$sessions-seed$seed}"
exec reef demo --sessions "$sessions" --seed "$seed" --out "$out"

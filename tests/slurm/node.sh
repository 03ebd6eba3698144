#!/usr/bin/env bash
# The first process of a node of Slurm: node.sh NAME. When it is gone, so is the node.
set -euo pipefail
/usr/sbin/slurmd -N "$1" -D &
while true; do wait -n 2>/dev/null || sleep 1; done # the parent of whatever loses its own

#!/usr/bin/env bash
# The first process of a Slurm node: node.sh NAME. The node ends with it.
set -euo pipefail
/usr/sbin/slurmd -N "$1" -D &
while true; do wait -n 2>/dev/null || sleep 1; done # it becomes the parent of orphans

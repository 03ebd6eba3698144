# Sourced by the other scripts of this folder. Submit those from the repository's root. `start_ranks ARGUMENTS` runs
# launch/train.py with them by one torchrun agent per node, and returns when it has ended.
#
# RLTRAIN_PYTHON is the interpreter on the nodes (default .venv/bin/python). RANKS_PER_NODE overrides the GPU count.
# Between nodes gloo uses the interface of the route to the first node, unless GLOO_SOCKET_IFNAME names another one.
# After a signal torchrun gives its ranks TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds to save (torchrun's own default is 30).
# checkpoint.stop_within_s, and Slurm's KillWait after scancel, can end them sooner.

# The rank of an agent is its node's position in the job's node list, and the first node is the master. So "node:N" in a
# placement is the N-th host of that list. torchrun's dynamic rendezvous would number nodes by their arrival.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}
# One port per job, below the ports of outgoing connections. This script runs on the first node and can test its ports.
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
while (: <"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
export MASTER_PORT
export RLTRAIN_PYTHON=${RLTRAIN_PYTHON:-$PWD/.venv/bin/python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-310}

start_ranks() {
  # --ntasks-per-node is set only here, because with it sbatch would take the fewest nodes of a range (--nodes 2-4).
  # The command is evaluated on each node, with SLURM_NODEID and SLURM_GPUS_ON_NODE set by Slurm.
  srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
    exec "$RLTRAIN_PYTHON" -m torch.distributed.run \
      --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
      --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
      --nproc-per-node "${RANKS_PER_NODE:-$SLURM_GPUS_ON_NODE}" \
      --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
      "$@"' ranks "${RANKS_RUN[@]:-launch/train.py}" "$@"
}

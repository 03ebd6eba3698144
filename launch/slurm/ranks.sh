# Sourced by the scripts beside it, which are submitted from the repository's root. `start_ranks ARGUMENTS` runs
# launch/train.py with them, by one torchrun agent per node, and returns when it has ended.
#
# RLTRAIN_PYTHON is the interpreter on the nodes (default .venv/bin/python); RANKS_PER_NODE overrides the GPU count.
# Between nodes gloo uses the interface of the route to the first node, unless GLOO_SOCKET_IFNAME names another one.
# torchrun gives its ranks TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds to save after a signal, by itself 30; what ends sooner
# is checkpoint.stop_within_s, and after scancel Slurm's own KillWait.

# The rank of an agent is the node's place in the job's node list and the first node is the master, so "node:N" in a
# placement is the N-th host of that list; torchrun's dynamic rendezvous would number nodes as they arrive.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}
# One per job, below the ports handed out to outgoing connections. This script runs on the first node: it sees what is
# taken there.
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
while (: <"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
export MASTER_PORT
export RLTRAIN_PYTHON=${RLTRAIN_PYTHON:-$PWD/.venv/bin/python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-310}

start_ranks() {
  # One task per node is said here alone: to sbatch it would mean the fewest nodes of a range (--nodes 2-4).
  # What follows is evaluated on each node, where Slurm has set SLURM_NODEID and SLURM_GPUS_ON_NODE.
  srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
    exec "$RLTRAIN_PYTHON" -m torch.distributed.run \
      --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
      --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
      --nproc-per-node "${RANKS_PER_NODE:-$SLURM_GPUS_ON_NODE}" \
      --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
      "$@"' ranks "${RANKS_RUN[@]:-launch/train.py}" "$@"
}

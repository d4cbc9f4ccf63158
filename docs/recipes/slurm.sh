#!/usr/bin/env bash
#SBATCH --job-name=jaxtensile
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=12:00:00
#
# The nodes of one allocation as a Ray cluster, for the jobs of one config:
#
#   sbatch slurm.sh /shared/train/jaxtensile.toml
#
# The config and the code are on a file system that all nodes share. Slurm gives whole nodes; jaxtensile divides the
# bytes of their devices. When the allocation ends, so does everything.
set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG}
port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{ print $1 }')

# The socket of each node's coordinator: a folder of this user's alone, on the node itself.
export JAXTENSILE_SOCKET=/tmp/jaxtensile-$UID-$SLURM_JOB_ID/coordinator.sock
# What the devices of a node may give: the same config, unless the machines have one of their own.
export JAXTENSILE_CONFIG=${JAXTENSILE_CONFIG:-$config}

srun --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
until ray status --address="$address:$port" > /dev/null 2>&1; do
  sleep 2
done

others=$((SLURM_JOB_NUM_NODES - 1))
if ((others > 0)); then
  srun --nodes="$others" --ntasks="$others" --exclude="$head" \
    ray start --address="$address:$port" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
fi

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  jaxtensile run --on ray --address "$address:$port" --config "$config"

#!/bin/bash
# A training run on Slurm: sbatch slurm.sh ENV [other settings of hurtle train]; ENVS_EACH=8 is the envs of each collector.
# The first node holds the learner, the others collectors. When the time is over the run saves; submit again with --resume.
#SBATCH --job-name=hurtle
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
port=${RAY_PORT:-6379}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | cut -d' ' -f1):$port

srun --nodes=1 --ntasks=1 -w "$head" ray start --head --node-ip-address="${address%:*}" --port="$port" \
    --num-cpus=0 --include-dashboard=false --block &
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 -w "$node" ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
done

collectors=$(((${#nodes[@]} - 1) * SLURM_CPUS_PER_TASK))
srun --overlap --nodes=1 --ntasks=1 -w "$head" \
    hurtle train "${@:-cartpole}" --runner ray --address "$address" \
    --num-collectors "$collectors" --num-envs $((collectors * ${ENVS_EACH:-8})) --progress plain &
run=$!
trap 'kill -TERM "$run"; wait "$run"' TERM
wait "$run"

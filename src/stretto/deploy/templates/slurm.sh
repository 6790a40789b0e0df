#!/usr/bin/env bash
#SBATCH --job-name=@name
#SBATCH --nodes=@hosts
#SBATCH --ntasks-per-node=1
#SBATCH @devices
#SBATCH --time=@hours:00:00
#SBATCH --signal=B:USR1@@@lead
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Account, partition and the like are given on the command line: sbatch --partition=... job.sh
#
# @lead seconds before the time is up, Slurm sends USR1 to this script. The run is then told to save and stop (SIGTERM),
# and the job queues itself again: it goes on where it was. A job that is cancelled is not queued again.
set -uo pipefail
here=@folder
# shellcheck disable=SC1091
if [ -r "$here/setup.sh" ]; then source "$here/setup.sh"; fi

child=""
over=""
helpers=()
tell() { if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null; fi; }
trap 'over=yes; tell' USR1
trap tell TERM INT
trap 'if [ "${#helpers[@@]}" -gt 0 ]; then kill "${helpers[@@]}" 2>/dev/null; fi' EXIT

if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
    # Several machines are one Ray cluster, which only those who know the token can use.
    RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))') || exit 1
    export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
    address=$(hostname -I | cut -d' ' -f1)
    port=$((20000 + SLURM_JOB_ID % 20000))
    srun --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --overlap \
        ray start --block --head --node-ip-address="$address" --port="$port" --include-dashboard=false &
    helpers+=("$!")
    for _ in $(seq 120); do
        if (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; then break; fi
        sleep 1
    done
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" --overlap \
        ray start --block --address="$address:$port" &
    helpers+=("$!")
    export RAY_ADDRESS="$address:$port"
fi

bash "$here/train.sh" &
child=$!
while :; do
    wait "$child"
    code=$?
    # A signal ends `wait`, not the run.
    if [ "$code" -gt 128 ] && kill -0 "$child" 2>/dev/null; then continue; fi
    break
done
if [ -n "$over" ] && [ "$code" -gt 128 ]; then
    echo "the time was up; job $SLURM_JOB_ID is queued again and goes on"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"

# Read by job.sh on every machine before anything else: make `stretto` and, for several machines, `ray` available here.
# module load python/3.12 cuda
# source "$HOME/stretto/.venv/bin/activate"
# export HF_HOME=/scratch/huggingface

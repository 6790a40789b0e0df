"""Files that start a run elsewhere: on Slurm, on Kubernetes, in a container, on rented machines. Nothing is started."""

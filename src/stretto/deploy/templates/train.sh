#!/usr/bin/env bash
# Begins the run, or goes on with it where its newest checkpoint stands. It can be started again and again: after a
# preemption, a time limit or a crash it goes on, and a run that has ended ends again.
# SIGTERM makes the run save and stop; that takes as long as a step at the most.
set -euo pipefail
cd -- @project
run=@run
if [ -e "$run/recipe.yaml" ]; then
    exec stretto resume "$run"
fi
if [ -d "$run" ]; then # ended before it began: nothing in it but its lock
    rm -f "$run/.lock"
    rmdir "$run" 2>/dev/null || true
fi
@{before}exec stretto @command

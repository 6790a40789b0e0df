# The table of V* is made first, beside the run's folder, and continued where it stopped. SIGTERM reaches that command.
mkdir -p "$(dirname "$run")"
stretto value @told &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do
    code=0
    wait "$child" || code=$?
done
trap - TERM INT
if [ "$code" -ne 0 ]; then exit "$code"; fi

# Several machines are one Ray cluster; one machine needs none. Read by the task on each of them.
if [ "$SKYPILOT_NUM_NODES" -gt 1 ]; then
    : "${RAY_AUTH_TOKEN:?launch it with --secret RAY_AUTH_TOKEN=..., the same for all machines: openssl rand -hex 32}"
    export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
    head=$(printf '%s\n' "$SKYPILOT_NODE_IPS" | head -n1)
    if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
        ray start --head --block --node-ip-address="$head" --port=6379 --include-dashboard=false &
        export RAY_ADDRESS="$head:6379"
    fi
    for _ in $(seq 120); do
        if (exec 3<>"/dev/tcp/$head/6379") 2>/dev/null; then break; fi
        sleep 1
    done
    if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
        ray start --block --address="$head:6379" || true # it ends when the first machine's does
    fi
fi

#!/bin/bash
# Train on two or more machines. The same command on each of them:
#
#   HOSTS="192.168.1.5 192.168.1.6" IFACE=eth0 ./train.sh --task digits --epochs 10
#
# HOSTS  an address of each machine on that network, in the same order everywhere; rank 0 is on the first
# IFACE  the network interface that has this machine's address; its name may differ between machines
# RANKS  ranks on this machine, which may differ too; default: one for each GPU
# OUT    folder of the run, with the same path on all machines; the disk need not be shared. Default: runs/two-hosts
set -eu
hosts=($HOSTS)
own=$(ip -4 -o addr show dev "$IFACE" | sed -E 's|.* inet ([0-9.]+).*|\1|')
node=-1
for at in "${!hosts[@]}"; do
    if grep -qxF "${hosts[$at]}" <<< "$own"; then node=$at; fi
done
if [ "$node" = -1 ]; then
    echo "none of HOSTS ($HOSTS) is an address of $IFACE on this machine, which has ${own:-none}" >&2
    exit 2
fi
exec torchrun --nnodes "${#hosts[@]}" --node-rank "$node" --nproc-per-node "${RANKS:-gpu}" \
    --master-addr "${hosts[0]}" --master-port "${PORT:-29500}" --local-addr "${hosts[$node]}" \
    -m thinwire train --iface "$IFACE" --resume --out "${OUT:-$PWD/runs/two-hosts}" "$@"

#!/bin/bash
# Bring up an encrypted network, as root, on each machine:  ./up.sh wg0.conf 10.88.0.1/24
# The interface has the name of the file. `ip link del wg0` takes it down.
set -eu
conf=$1 address=$2
iface=$(basename "$conf" .conf)
if ! ip link add "$iface" type wireguard 2> /dev/null; then
    wireguard-go "$iface" > /dev/null 2>&1  # the Linux kernel has no WireGuard: a program that does the same
fi
wg setconf "$iface" "$conf"
ip addr add "$address" dev "$iface"
ip link set mtu "${MTU:-1420}" up dev "$iface"

#!/bin/sh
# Does the card work here? Run it as `telpher verbs run sh smoke.sh`: two processes of this machine talk in each way that most
# programs use. No argument, no root, no network: the loopback interface is enough.
set -eu
work=$(mktemp -d)
server=
trap 'if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; fi; rm -rf "$work"' EXIT
port=${SMOKE_PORT:-18515}

device=$(ibv_devices | awk 'NR == 3 { print $1 }')
[ -n "$device" ] || { echo "no RDMA device: is this run under \`telpher verbs run\`?"; exit 1; }
ibv_devinfo -d "$device" | grep -q PORT_ACTIVE || { echo "$device has no active port"; exit 1; }
# The card's address: its GID ends with it.
address=$(ibv_devinfo -v -d "$device" | sed -n 's/.*GID\[ *0\]:[[:space:]]*::ffff:\([0-9.]*\).*/\1/p' | head -1)
[ -n "$address" ] || { echo "GID 0 of $device is no IPv4 address"; exit 1; }

# Is something listening: a TCP port, or one of the card's connection manager?
listens() { grep -qi ":$(printf %04X "$port") .* 0A " /proc/net/tcp /proc/net/tcp6 2>/dev/null || grep -q "@telpher-verbs/.*/port/[0-9a-f]*/$port\$" /proc/net/unix; }
pair() { # the server's arguments, "--", the client's
	name=$1 arguments=
	port=$((port + 1))
	while [ "$1" != -- ]; do arguments="$arguments $1"; shift; done
	shift
	timeout 60 $arguments -p $port >"$work/server" 2>&1 &
	server=$!
	tries=0
	until listens || [ $tries = 100 ]; do sleep 0.1; tries=$((tries + 1)); done
	if ! timeout 60 "$@" -p $port >"$work/client" 2>&1 || ! wait $server; then
		echo "$name: FAILED"
		cat "$work/server" "$work/client"
		exit 1
	fi
	server=
	echo "$name: fine"
}
pair ibv_rc_pingpong -d "$device" -g 0 -n 100 -- ibv_rc_pingpong -d "$device" -g 0 -n 100 "$address"
# What an unreliable datagram loses is lost, and that program waits for it.
[ -n "${TELPHER_VERBS_FAULT:-}" ] || pair ibv_ud_pingpong -d "$device" -g 0 -n 100 -- ibv_ud_pingpong -d "$device" -g 0 -n 100 "$address"
for program in ib_write_bw ib_read_bw ib_send_bw; do
	pair $program -d "$device" -x 0 -F -n 200 -s 65536 -- $program -d "$device" -x 0 -F -n 200 -s 65536 "$address"
done
pair ib_atomic_bw -d "$device" -x 0 -F -n 200 -- ib_atomic_bw -d "$device" -x 0 -F -n 200 "$address"
pair rping -s -a "$address" -C 5 -- rping -c -a "$address" -C 5 -V
echo "the card works"

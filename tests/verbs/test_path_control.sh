#!/bin/bash
# Faults and captures ordered of processes that are connected by the short way.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
[ -z "$card_preload" ] || { echo "not under a sanitizer: every program would need its runtime in front"; exit 77; }
need ib_send_bw perftest
export TELPHER_VERBS_CARRIER=auto NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=NET LD_LIBRARY_PATH=$CARD
telpher=$BUILD_DIR/bin/telpher
order() { NCCL_DEBUG=WARN "$telpher" verbs "$@"; }
address=$(NCCL_DEBUG=WARN gid_address)
[ -n "$address" ] || { echo "GID 0 isn't IPv4"; exit 77; }
begin() { # PROGRAM ARGUMENTS: server and client run
	TCP_PORT=$((TCP_PORT + 1))
	"$@" -p $TCP_PORT >"$WORK/server" 2>&1 & server=$!
	listened $TCP_PORT
	"$@" -p $TCP_PORT $address >"$WORK/client" 2>&1 & client=$!
	for _ in $(seq 1000); do
		order pairs | awk -v a=$client -v b=$server '$1 == a && $2 == b && $4 == "path" && $5 + $7 > 100 { found = 1 } END { exit !found }' && return
		sleep 0.05
	done
	fail "no connection by the short way: $(order pairs; cat "$WORK/client")"
}

# In packets of 1024 bytes, whatever the interface carries: a WRITE has a first and a last.
begin ib_write_bw -x 0 -m 1024 -s 3000 -D 60 -F -u 18
order fault -p $client drop=0.001,delay=0.001:1ms,corrupt=0.001,seed=4 || fail "an order ends with $?"
order capture -p $client "$WORK/client.pcapng" 0.3 || fail "capture ends with $?"
order fault -p $client none || fail "the faults can't be ended"
order fault -p $server side=in,drop=0.001,slow=20us,scatter=0.5,seed=5 || fail "an order to the target ends with $?"
order capture -p $server "$WORK/server.pcapng" 0.8 || fail "capture of the target ends with $?"
order fault -p $server none || fail "the target's faults can't be ended"
end_early $client
wait $client || { cat "$WORK/client"; fail "the client was disturbed"; }
wait $server || { cat "$WORK/server"; fail "the server was disturbed"; }
for side in client server; do
	[ "$(stat -c %s "$WORK/$side.pcapng")" -gt 10000 ] || fail "hardly a packet of the $side was captured"
done
if command -v tshark >/dev/null; then
	tshark -r "$WORK/server.pcapng" 2>/dev/null | head -2000 >"$WORK/lines"
	grep -q 'RDMA Write Last' "$WORK/lines" && grep -q 'Acknowledge' "$WORK/lines" || fail "tshark sees no WRITEs and acknowledgements: $(head -5 "$WORK/lines")"
fi

# A port that is dead: as if nobody were there.
begin ib_send_bw -x 0 -s 3000 -D 60 -F -u 12
order fault -p $client dead || fail "an order ends with $?"
wait $client && fail "a client with a dead port goes on"
grep -q 'status 12' "$WORK/client" || fail "a dead port isn't status 12: $(tail -5 "$WORK/client")"
kill $server 2>/dev/null
wait $server 2>/dev/null
echo "orders are carried out by the short way"

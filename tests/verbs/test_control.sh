#!/bin/bash
# `telpher verbs fault` and `telpher verbs capture` on a program that runs.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
[ -z "$card_preload" ] || { echo "not under a sanitizer: every program would need its runtime in front"; exit 77; }
need ib_send_bw perftest
telpher=$BUILD_DIR/bin/telpher
address=$(gid_address)
[ -n "$address" ] || { echo "GID 0 isn't IPv4"; exit 77; }
TELPHER_VERBS_CONTROL=0 LD_LIBRARY_PATH=$CARD ib_send_bw -x 0 -s 4096 -D 60 -F -u 18 -p $TCP_PORT >"$WORK/server" 2>&1 & server=$!
listened $TCP_PORT
LD_LIBRARY_PATH=$CARD ib_send_bw -x 0 -s 4096 -D 60 -F -u 18 -p $TCP_PORT $address >"$WORK/client" 2>&1 & client=$!
listens() { grep -q "@telpher-verbs/1/$(id -u)/control/$client/" /proc/net/unix; }
for _ in $(seq 1000); do listens && break; sleep 0.05; done
listens || fail "the client takes no orders: $(cat "$WORK/client")"
[ "$("$telpher" verbs fault -p $client)" = "$client	none" ] || fail "there are faults from the start: $("$telpher" verbs fault -p $client)"
"$telpher" verbs fault -p $client drop=0.01,seed=4 || fail "an order ends with $?"
"$telpher" verbs fault -p $client drop=0.01,thing 2>/dev/null && fail "a wrong list is taken"
[ "$("$telpher" verbs fault --all | grep ^$client)" = "$client	drop=0.01,seed=4" ] || fail "the faults aren't shown"
"$telpher" verbs capture -p $client "$WORK/%p.pcapng" 0.3 || fail "capture ends with $?"
"$telpher" verbs fault -p $client none || fail "the faults can't be ended"
[ "$(head -c 4 "$WORK/$client.pcapng" | od -An -tx1 | tr -d ' ')" = 0a0d0d0a ] || fail "no pcapng file"
[ "$(stat -c %s "$WORK/$client.pcapng")" -gt 10000 ] || fail "hardly a packet was captured"
size=$(stat -c %s "$WORK/$client.pcapng")
"$telpher" verbs fault -p $server none 2>"$WORK/out" && fail "an order to a process that takes none is fine"
grep -q "can't be reached" "$WORK/out" || fail "who can't be reached isn't said: $(cat "$WORK/out")"
end_early $client $server
wait $client || { cat "$WORK/client"; fail "the client was disturbed"; }
wait $server || { cat "$WORK/server"; fail "the server was disturbed"; }
[ "$size" = "$(stat -c %s "$WORK/$client.pcapng")" ] || fail "the capture went on"
"$telpher" verbs fault -p $client none 2>/dev/null && fail "an order to a process that has ended is fine"
# Containers of one pod: they share the network, and number their processes alike.
if [ "$(id -u)" = 0 ] && unshare -p -f --mount-proc true 2>/dev/null; then
	in_pod="unshare -p -f --mount-proc --kill-child"
	at_server=$in_pod at_client=$in_pod pair $address ib_send_bw -x 0 -s 4096 -n 1000 -F -u 18
	! grep WARN "$WORK/server" "$WORK/client" || fail "processes of one number disturb each other"
fi
"$telpher" verbs fault --help | grep -q memlock= || fail "no help"
echo "orders are carried out"

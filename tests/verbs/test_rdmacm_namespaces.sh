#!/bin/bash
# Connections by IP address between two network namespaces as two hosts: the connection manager's messages go by the wire.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
case $card_preload in *libtsan*) echo "the thread sanitizer's runtime doesn't bear programs that it didn't build"; exit 77 ;; esac
[ -e "$CARD/librdmacm.so.1" ] || { echo "librdmacm isn't built (Debian: librdmacm-dev)"; exit 77; }
need rping rdmacm-utils
. "$SOURCE_DIR/tests/verbs/lib_namespaces.sh"
work=$(mktemp -d) || exit 1
server=
trap '[ -z "$server" ] || kill $server 2>/dev/null; delete_namespaces; rm -rf "$work"' EXIT
make_hosts
export -f run_on_card
export BUILD_DIR CARD card_preload
on_card=(timeout 60 bash -c 'run_on_card "$@"' run)
# Is the port held by a listener of A?
holds() { at_a grep -qE "@telpher-verbs/1/$(id -u)/port/[0-9a-f]+/$1$" /proc/net/unix; }
port=7200
pair() { # server's arguments (at A) -- client's (at B)
	local arguments=() at=$port
	while [ "$1" != -- ]; do arguments+=("$1"); shift; done
	shift
	at_a "${on_card[@]}" "${arguments[@]}" >"$work/server" 2>&1 & server=$!
	for _ in $(seq 1000); do holds "$at" && break; sleep 0.05; done
	at_b "${on_card[@]}" "$@" >"$work/client" 2>&1 ||
		fail "$*: client ends with $? [${TELPHER_VERBS_FAULT:-no faults}]: $(cat "$work/client" "$work/server")"
	wait $server
	local status=$?
	ended_well $status "$work/server" || fail "$*: server ends with $status [${TELPHER_VERBS_FAULT:-no faults}]: $(cat "$work/server" "$work/client")"
	server=
	port=$((port + 1))
}
# Without a keeper (later there is one, which stays a while), and with it.
TELPHER_VERBS_SHARE=0 pair rping -s -a 10.99.7.1 -p $port -C 5 -- rping -c -a 10.99.7.1 -p $port -C 5 -V
pair rping -s -a 10.99.7.1 -p $port -C 10 -- rping -c -a 10.99.7.1 -p $port -C 10 -V
pair ucmatose -p $port -c 20 -- ucmatose -p $port -c 20 -s 10.99.7.1
at=$port; port=7174; pair udaddy -- udaddy -s 10.99.7.1; port=$at
if command -v ib_send_bw >/dev/null; then pair ib_send_bw -R -F -n 100 -s 4096 -p $port -- ib_send_bw -R -F -n 100 -s 4096 -p $port 10.99.7.1; fi
# Nobody listens: A's keeper says so, if A has one, and the client hears it at once.
pair ucmatose -p $port -c 1 -- ucmatose -p $port -c 1 -s 10.99.7.1
at_b "${on_card[@]}" rping -c -a 10.99.7.1 -p $port -C 1 >"$work/out" 2>&1
grep -q 'REJECTED, error 8' "$work/out" || fail "a port that nobody listens on isn't refused over the wire: $(cat "$work/out")"
# After the keeper's death.
at_a "${on_card[@]}" ucmatose -p $port -c 3 >"$work/server" 2>&1 & server=$!
for _ in $(seq 1000); do holds $port && break; sleep 0.05; done
inode=
for _ in $(seq 1000); do
	inode=$(at_a awk -v name="@telpher-verbs-$(id -u)-4791" '$8 == name && $6 == "01" { print $7; exit }' /proc/net/unix)
	[ -n "$inode" ] && break
	sleep 0.05
done
[ -n "$inode" ] || fail "no keeper runs"
for pid in $(grep -lx telpher-keeper /proc/[0-9]*/comm 2>/dev/null | cut -d/ -f3); do
	readlink /proc/$pid/fd/* 2>/dev/null | grep -qx "socket:\[$inode\]" && kill -9 $pid
done
at_b "${on_card[@]}" ucmatose -p $port -c 3 -s 10.99.7.1 >"$work/client" 2>&1 || fail "no connection after the keeper's death: $(cat "$work/client" "$work/server")"
wait $server || fail "the server was disturbed by the keeper's death: $(cat "$work/server")"
server=
port=$((port + 1))
# Messages are lost, doubled and late, on both sides.
export TELPHER_VERBS_FAULT=drop=0.1,duplicate=0.05,delay=0.05:5ms,seed=5
pair ucmatose -p $port -c 10 -- ucmatose -p $port -c 10 -s 10.99.7.1
TELPHER_VERBS_FAULT=drop=0.03,seed=6 pair rping -s -a 10.99.7.1 -p $port -C 5 -- rping -c -a 10.99.7.1 -p $port -C 5 -V
unset TELPHER_VERBS_FAULT
# A stranger who knows all of a connection's numbers can't end it; the peer can.
at_a "${on_card[@]}" rping -s -a 10.99.7.1 -p $port -C 100000000 >"$work/server" 2>&1 & server=$!
for _ in $(seq 1000); do holds $port && break; sleep 0.05; done
TELPHER_VERBS_CAPTURE=$work/capture at_b "${on_card[@]}" rping -c -a 10.99.7.1 -p $port -C 100000000 >"$work/client" 2>&1 & client=$!
for _ in $(seq 1000); do [ "$(stat -c %s "$work/capture" 2>/dev/null || echo 0)" -gt 20000 ] && break; sleep 0.05; done
ip -n $HOST_B addr add 10.99.7.3/24 dev v0
at_b python3 "$SOURCE_DIR/tests/verbs/forge_dreq.py" "$work/capture" 10.99.7.3 10.99.7.1 || fail "a stranger's DREQ isn't answered"
sleep 0.5
kill -0 $server && kill -0 $client || fail "a stranger ended the connection: $(cat "$work/server" "$work/client")"
at_b python3 "$SOURCE_DIR/tests/verbs/forge_dreq.py" "$work/capture" 10.99.7.2 10.99.7.1
for _ in $(seq 1000); do kill -0 $server 2>/dev/null || break; sleep 0.1; done
kill -0 $server 2>/dev/null && fail "the peer's DREQ doesn't end the connection: $(cat "$work/server")"
kill $client 2>/dev/null; wait $client $server 2>/dev/null
server=
port=$((port + 1))
# A client that is killed says nothing: its keeper does.
at_a "${on_card[@]}" rping -s -a 10.99.7.1 -p $port -C 100000000 >"$work/server" 2>&1 & server=$!
for _ in $(seq 1000); do holds $port && break; sleep 0.05; done
TELPHER_VERBS_CAPTURE=$work/capture2 at_b "${on_card[@]}" rping -c -a 10.99.7.1 -p $port -C 100000000 >"$work/client" 2>&1 & client=$!
for _ in $(seq 1000); do [ "$(stat -c %s "$work/capture2" 2>/dev/null || echo 0)" -gt 20000 ] && break; sleep 0.05; done
for pid in $(ip netns pids $HOST_B); do [ "$(cat /proc/$pid/comm 2>/dev/null)" = rping ] && kill -9 $pid; done
for _ in $(seq 1000); do kill -0 $server 2>/dev/null || break; sleep 0.1; done
kill -0 $server 2>/dev/null && fail "a killed client isn't missed: $(cat "$work/server")"
grep -q 'DISCONNECT EVENT' "$work/server" || fail "a killed client isn't missed: $(cat "$work/server")"
wait $client $server 2>/dev/null
server=
port=$((port + 1))
export TELPHER_VERBS_GIDS=all
pair rping -s -a fd00:99:7::1 -p $port -C 5 -- rping -c -a fd00:99:7::1 -p $port -C 5 -V
echo "connected over the wire"

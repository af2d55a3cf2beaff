#!/bin/bash
# The process that shares the port out is killed: those who talk go on, others can join.
set -u
# In a network of its own, where there is no other keeper and nobody else for whom it stays.
if [ -z "${ALONE:-}" ] && unshare -n true 2>/dev/null; then exec env ALONE=1 unshare -n bash -c 'ip link set lo up; exec bash "$0"' "$0"; fi
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ib_send_bw perftest
address=$(gid_address)
[ -n "$address" ] || { echo "GID 0 isn't IPv4"; exit 77; }
keepers() {
	local inode pid
	inode=$(awk -v name="@telpher-verbs-$(id -u)-4791" '$8 == name && $6 == "01" { print $7; exit }' /proc/net/unix)
	[ -n "$inode" ] || return
	for pid in $(grep -lx telpher-keeper /proc/[0-9]*/comm 2>/dev/null | cut -d/ -f3); do
		readlink /proc/$pid/fd/* 2>/dev/null | grep -qx "socket:\[$inode\]" && echo $pid
	done
}
in_card="env NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=NET LD_LIBRARY_PATH=$CARD LD_PRELOAD=$card_preload ASAN_OPTIONS=detect_leaks=0"
port=$((19000 + $$ % 999))
$in_card ib_send_bw -x 0 -s 4096 -D 60 -u 18 -p $port >"$WORK/s" 2>&1 & server=$!
listened $port
$in_card ib_send_bw -x 0 -s 4096 -D 60 -u 18 -p $port $address >"$WORK/c" 2>&1 & client=$!
for side in s c; do
	for _ in $(seq 1000); do grep -q 'carried by wire' "$WORK/$side" && break; sleep 0.05; done
done
first=$(keepers)
[ -n "$first" ] || fail "no keeper runs"
kill -9 $first
pair $address ibv_rc_pingpong -g 0 -n 50
second=$(keepers)
[ -n "$second" ] && [ "$second" != "$first" ] || fail "no new keeper: before \"$first\", now \"$second\""
end_early $client $server
wait $server || { cat "$WORK/s"; fail "the server was disturbed"; }
wait $client || { cat "$WORK/c"; fail "the client was disturbed"; }
for _ in $(seq 1000); do
	[ -z "$(keepers)" ] && break
	sleep 0.1
done
[ -z "$(keepers)" ] || fail "the keeper doesn't end"
echo "the keeper's death is survived"

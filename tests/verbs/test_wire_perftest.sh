#!/bin/bash
# Every program and mode of perftest that needs no raw Ethernet, once, small, over the wire. LONG=1: all sizes, more repeats.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ib_write_bw perftest
need ib_send_lat perftest
# Loopback, whose packets may have 4096 bytes.
export TELPHER_VERBS_IFNAME=lo
address=$(gid_address)
[ "$address" = 127.0.0.1 ] || { echo "GID 0 isn't 127.0.0.1"; exit 77; }
few=40 size="-s 5000"
[ -z "${LONG:-}" ] || few=1000 size=-a
# -u 18: an error only after 8.6 s, however busy the machine is. Four at a time: most of a pair's time is starting and ending.
count=0
mode() {
	count=$((count + 1))
	TCP_PORT=$((TCP_PORT + 1))
	mkdir "$WORK/$count"
	(
		trap - EXIT
		WORK=$WORK/$count
		pair $address "$@" -x 0 -F -u 18 >"$WORK/said" 2>&1
		touch "$WORK/passed"
	) &
	[ $((count % 4)) != 0 ] || judge
}
judge() {
	local one
	wait
	for one in "$WORK"/[0-9]*; do
		[ -e "$one" ] || continue
		[ -e "$one/passed" ] || { cat "$one/said"; fail "see above"; }
		rm -rf "$one"
	done
}

# Each program with each transport that has it.
for program in ib_write_bw ib_write_lat ib_send_bw ib_send_lat; do
	for transport in RC UC XRC; do
		mode $program -c $transport $size -n $few
	done
done
for program in ib_read_bw ib_read_lat; do
	for transport in RC XRC; do
		mode $program -c $transport $size -n $few
	done
done
for program in ib_atomic_bw ib_atomic_lat; do
	for transport in RC XRC; do
		mode $program -c $transport -A FETCH_AND_ADD -n $few
	done
done
for program in ib_send_bw ib_send_lat; do
	mode $program -c UD -s 1000 -n $few
done
# Events instead of polling, several QPs, both ways, lists, inline data, shared receive queues, connections by the manager.
for program in ib_send_bw ib_send_lat; do
	mode $program -s 3000 -n $few -e
done
for program in ib_write_bw ib_read_bw ib_send_bw ib_atomic_bw; do
	bytes="-s 3000"
	[ $program != ib_atomic_bw ] || bytes=
	mode $program $bytes -n $few -q 4
	mode $program $bytes -n $few -b
	mode $program $bytes -n $few -R
done
mode ib_write_bw -s 64 -n 256 -l 16
mode ib_send_bw -s 64 -n 256 -l 16
mode ib_write_bw -s 64 -n $few --inline_size 64
mode ib_send_lat -s 64 -n $few --inline_size 64
mode ib_send_bw -s 64 -n $few -c UD --inline_size 64
mode ib_send_bw -s 3000 -n $few --use-srq -q 2
mode ib_send_lat -s 3000 -n $few --use-srq
mode ib_send_bw -s 1000 -n $few -c UD -q 2 -b
for mtu in 256 512 1024 2048 4096; do
	mode ib_write_bw -s 20000 -n $few -m $mtu
done
judge
echo "$count programs and modes ran"

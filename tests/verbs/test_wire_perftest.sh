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
# -u 18: an error only after 8.6 s, however busy the machine is.
mode() { at_once pair $address "$@" -x 0 -F -u 18; }
# Under the address sanitizer, what takes another way through the card; a program that measures another thing takes none.
also() { [ -n "$card_preload" ] || mode "$@"; }

# Each program with each transport that has it.
for transport in RC UC XRC; do
	for program in ib_write ib_send; do
		mode ${program}_bw -c $transport $size -n $few
		also ${program}_lat -c $transport $size -n $few
	done
done
for transport in RC XRC; do
	mode ib_read_bw -c $transport $size -n $few
	also ib_read_lat -c $transport $size -n $few
	also ib_atomic_bw -c $transport -A FETCH_AND_ADD -n $few
	mode ib_atomic_lat -c $transport -A FETCH_AND_ADD -n $few
done
also ib_send_bw -c UD -s 1000 -n $few
mode ib_send_lat -c UD -s 1000 -n $few
# Events instead of polling, several QPs, both ways, lists, inline data, shared receive queues, connections by the manager.
also ib_send_bw -s 3000 -n $few -e
mode ib_send_lat -s 3000 -n $few -e
for program in ib_write_bw ib_read_bw ib_send_bw ib_atomic_bw; do
	bytes="-s 3000"
	[ $program != ib_atomic_bw ] || bytes=
	also $program $bytes -n $few -q 4
	mode $program $bytes -n $few -q 2 -b
	also $program $bytes -n $few -R
done
mode ib_send_lat -s 3000 -n $few -R
also ib_write_bw -s 64 -n 256 -l 16
mode ib_send_bw -s 64 -n 256 -l 16
mode ib_write_bw -s 64 -n $few --inline_size 64
also ib_send_lat -s 64 -n $few --inline_size 64
mode ib_send_bw -s 64 -n $few -c UD --inline_size 64
mode ib_send_bw -s 3000 -n $few --use-srq -q 2
also ib_send_lat -s 3000 -n $few --use-srq
also ib_send_bw -s 1000 -n $few -c UD -q 2 -b
for mtu in 256 512 2048 4096; do
	also ib_write_bw -s 20000 -n $few -m $mtu
done
judge
echo "$count programs and modes ran"

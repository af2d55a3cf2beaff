#!/bin/bash
# Debian's unmodified programs talk over the wire, two processes of one machine that share the port; with and without loss.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ibv_rc_pingpong ibverbs-utils
need ib_write_bw perftest
address=$(gid_address)
[ -n "$address" ] || { echo "GID 0 isn't IPv4"; exit 77; }

one() { at_once pair $address "$@"; }
# -u 18: an error only after 8.6 s, however busy the machine is.
bench() { one "$@" -x 0 -u 18; }
# Under the address sanitizer, what takes another way through the card; a program that measures another thing takes none.
also() { [ -n "$card_preload" ] || "$@"; }
for mtu in 256 4096; do
	one ibv_rc_pingpong -g 0 -n 50 -m $mtu
done
also one ibv_rc_pingpong -g 0 -n 50 -e
one ibv_uc_pingpong -g 0 -n 50
one ibv_ud_pingpong -g 0 -n 50
one ibv_srq_pingpong -g 0 -n 20
one ibv_xsrq_pingpong -g 0 -n 20
for program in write read send; do
	also bench ib_${program}_bw -s 50001 -n 100
	also bench ib_${program}_lat -s 2 -n 50
done
also bench ib_atomic_bw -n 100
bench ib_atomic_lat -n 50 -A CMP_AND_SWAP
also bench ib_send_bw -c UD -s 1000 -n 100
also bench ib_send_bw -c UC -s 3000 -n 100
bench ib_write_bw -q 8 -s 8 -n 200 -l 8
bench ib_send_bw -b -s 65536 -n 100 -e
judge

# What is lost must be repaired long before.
export TELPHER_VERBS_FAULT=drop=0.03,duplicate=0.02,reorder=0.02,corrupt=0.01,delay=0.01:1ms,seed=3
for program in write read send; do
	bench ib_${program}_bw -s 30000 -n 60 -m 1024
done
bench ib_atomic_bw -n 60
bench ib_send_lat -s 5000 -n 30
judge
echo "programs talk over the wire"

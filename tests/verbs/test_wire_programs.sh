#!/bin/bash
# Debian's unmodified programs talk over the wire, two processes of one machine that share the port; with and without loss.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ibv_rc_pingpong ibverbs-utils
need ib_write_bw perftest
address=$(gid_address)
[ -n "$address" ] || { echo "GID 0 isn't IPv4"; exit 77; }

for mtu in 256 4096; do
	pair $address ibv_rc_pingpong -g 0 -n 50 -m $mtu
done
pair $address ibv_rc_pingpong -g 0 -n 50 -e
pair $address ibv_uc_pingpong -g 0 -n 50
pair $address ibv_ud_pingpong -g 0 -n 50
pair $address ibv_srq_pingpong -g 0 -n 20
pair $address ibv_xsrq_pingpong -g 0 -n 20
for program in write read send; do
	pair $address ib_${program}_bw -x 0 -s 50001 -n 100
	pair $address ib_${program}_lat -x 0 -s 2 -n 50
done
pair $address ib_atomic_bw -x 0 -n 100
pair $address ib_atomic_lat -x 0 -n 50 -A CMP_AND_SWAP
pair $address ib_send_bw -x 0 -c UD -s 1000 -n 100
pair $address ib_send_bw -x 0 -c UC -s 3000 -n 100
pair $address ib_write_bw -x 0 -q 8 -s 8 -n 200 -l 8
pair $address ib_send_bw -x 0 -b -s 65536 -n 100 -e

# -u 17: error only after 4.3 s, however busy the machine is; what is lost must be repaired long before.
export TELPHER_VERBS_FAULT=drop=0.03,duplicate=0.02,reorder=0.02,corrupt=0.01,delay=0.01:1ms,seed=3
for program in write read send; do
	pair $address ib_${program}_bw -x 0 -s 30000 -n 60 -u 17 -m 1024
done
pair $address ib_atomic_bw -x 0 -n 60 -u 17
pair $address ib_send_lat -x 0 -s 5000 -n 30 -u 17
echo "programs talk over the wire"

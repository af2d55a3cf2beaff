#!/bin/bash
# Two network namespaces as two hosts: everything crosses a network interface, with loss by the network and by our own faults.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ib_write_bw perftest
need ethtool ethtool
. "$SOURCE_DIR/tests/verbs/lib_namespaces.sh"
trap 'delete_namespaces; finish_wire' EXIT
make_hosts
at_server="ip netns exec $HOST_A" at_client="ip netns exec $HOST_B"
unset TELPHER_VERBS_CARRIER
for program in write read send; do
	pair 10.99.7.1 ib_${program}_bw -x 0 -s 65536 -n 200 -m 4096 -u 18
done
pair 10.99.7.1 ib_atomic_lat -x 0 -n 50 -u 18
pair 10.99.7.1 ib_send_bw -x 0 -c UD -s 2000 -n 100 -u 18
# Interfaces without offloads: each packet alone.
at_a ethtool -K v0 tx off gso off gro off >/dev/null 2>&1
at_b ethtool -K v0 tx off gso off gro off >/dev/null 2>&1
pair 10.99.7.1 ib_write_bw -x 0 -s 65536 -n 100 -u 18
pair 10.99.7.1 ib_read_bw -x 0 -s 65536 -n 100 -u 18
export TELPHER_VERBS_FAULT=drop=0.05,seed=11
pair 10.99.7.1 ib_write_bw -x 0 -s 65536 -n 50 -u 18
unset TELPHER_VERBS_FAULT
# The kernel itself loses, by netem or by a filter, whatever of the two it has.
if tc -n $HOST_B qdisc add dev v0 root netem loss 2% 2>/dev/null; then
	pair 10.99.7.1 ib_read_bw -x 0 -s 65536 -n 50 -u 18
	tc -n $HOST_B qdisc del dev v0 root
elif refusal=$(at_b iptables -A INPUT -p udp --dport 4791 -m statistic --mode random --probability 0.02 -j DROP 2>&1); then
	for program in read write send; do pair 10.99.7.1 ib_${program}_bw -x 0 -s 65536 -n 50 -u 18; done
	dropped=$(at_b iptables -nvxL INPUT | awk '/statistic/ { print $1 }')
	[ "$dropped" -gt 0 ] || fail "the filter dropped nothing: $(at_b iptables -nvxL INPUT)"
	at_b iptables -F INPUT
else
	echo "no loss by the network: $refusal"
fi
# IPv6, where the ICRC covers no identification.
export TELPHER_VERBS_GIDS=all
gid=$(on_card $at_server ibv_devinfo -v | sed -n 's/.*GID\[ *\([0-9]*\)\]:.*fd00:.*/\1/p' | head -1)
[ -n "$gid" ] || fail "no GID for fd00:99:7::1"
pair 10.99.7.1 ib_send_bw -x $gid -s 65536 -n 100 -u 18
pair 10.99.7.1 ib_send_bw -x $gid -c UD -s 1000 -n 50 -u 18
echo "two namespaces talk"

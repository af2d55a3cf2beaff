#!/bin/bash
# Two network namespaces as two hosts: everything crosses a network interface, with loss by the network and by our own faults.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ib_write_bw perftest
[ "$(id -u)" = 0 ] || { echo "needs root for network namespaces"; exit 77; }
need ip iproute2
need ethtool ethtool
a=tpa$$ b=tpb$$
cleanup() { ip netns del $a 2>/dev/null; ip netns del $b 2>/dev/null; finish_wire; }
trap cleanup EXIT
ip netns add $a 2>/dev/null && ip netns add $b || { echo "can't make network namespaces"; exit 77; }
ip netns exec $a true 2>/dev/null || { echo "can't run programs in a network namespace (a chroot?)"; exit 77; }
ip link add v$a netns $a type veth peer name v$b netns $b || { echo "can't make a veth pair"; exit 77; }
for side in "$a 1" "$b 2"; do
	set -- $side
	ip -n $1 addr add 10.99.7.$2/24 dev v$1
	ip -n $1 addr add fd00:99:7::$2/64 dev v$1 nodad
	ip -n $1 link set lo up
	ip -n $1 link set v$1 mtu 4200 up
done
for side in $a $b; do
	for _ in $(seq 1000); do
		ip -n $side link show v$side | grep -q 'state UP' && break
		sleep 0.05
	done
done
at_server="ip netns exec $a" at_client="ip netns exec $b"
unset TELPHER_VERBS_CARRIER
for program in write read send; do
	pair 10.99.7.1 ib_${program}_bw -x 0 -s 65536 -n 200 -m 4096 -u 18
done
pair 10.99.7.1 ib_atomic_lat -x 0 -n 50 -u 18
pair 10.99.7.1 ib_send_bw -x 0 -c UD -s 2000 -n 100 -u 18
# Interfaces without offloads: each packet alone.
ip netns exec $a ethtool -K v$a tx off gso off gro off >/dev/null 2>&1
ip netns exec $b ethtool -K v$b tx off gso off gro off >/dev/null 2>&1
pair 10.99.7.1 ib_write_bw -x 0 -s 65536 -n 100 -u 18
pair 10.99.7.1 ib_read_bw -x 0 -s 65536 -n 100 -u 18
export TELPHER_VERBS_FAULT=drop=0.05,seed=11
pair 10.99.7.1 ib_write_bw -x 0 -s 65536 -n 50 -u 18
unset TELPHER_VERBS_FAULT
# The kernel itself loses, by netem or by a filter, whatever of the two it has.
if tc -n $b qdisc add dev v$b root netem loss 2% 2>/dev/null; then
	pair 10.99.7.1 ib_read_bw -x 0 -s 65536 -n 50 -u 18
	tc -n $b qdisc del dev v$b root
elif refusal=$(ip netns exec $b iptables -A INPUT -p udp --dport 4791 -m statistic --mode random --probability 0.02 -j DROP 2>&1); then
	for program in read write send; do pair 10.99.7.1 ib_${program}_bw -x 0 -s 65536 -n 50 -u 18; done
	dropped=$(ip netns exec $b iptables -nvxL INPUT | awk '/statistic/ { print $1 }')
	[ "$dropped" -gt 0 ] || fail "the filter dropped nothing: $(ip netns exec $b iptables -nvxL INPUT)"
	ip netns exec $b iptables -F INPUT
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

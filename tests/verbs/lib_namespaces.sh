# Two network namespaces as two hosts, after lib_card.sh or lib_wire.sh: HOST_A (10.99.7.1, fd00:99:7::1), HOST_B (….2), joined by a
# veth pair; at_a and at_b run a command there. cleanup_namespaces removes them.
[ "$(id -u)" = 0 ] || { echo "needs root for network namespaces"; exit 77; }
need ip iproute2
HOST_A=tpa$$ HOST_B=tpb$$
cleanup_namespaces() {
	local name number
	for name in $HOST_A $HOST_B; do
		# The card's counters would outlive the namespace.
		number=$(stat -L -c %i /run/netns/$name 2>/dev/null) && rm -f /dev/shm/telpher-verbs-counters-*-$number-*
		ip netns del $name 2>/dev/null
	done
}
make_namespaces() {
	local name octet
	ip netns add $HOST_A 2>/dev/null && ip netns add $HOST_B || { echo "can't make network namespaces"; exit 77; }
	ip netns exec $HOST_A true 2>/dev/null || { echo "can't run programs in a network namespace (a chroot?)"; exit 77; }
	ip link add v$HOST_A netns $HOST_A type veth peer name v$HOST_B netns $HOST_B || { echo "can't make a veth pair"; exit 77; }
	for side in "$HOST_A 1" "$HOST_B 2"; do
		read -r name octet <<<"$side"
		ip -n $name addr add 10.99.7.$octet/24 dev v$name
		ip -n $name addr add fd00:99:7::$octet/64 dev v$name nodad
		ip -n $name link set lo up
		ip -n $name link set v$name mtu 4200 up
	done
	for name in $HOST_A $HOST_B; do
		for _ in $(seq 1000); do
			ip -n $name link show v$name | grep -q 'state UP' && break
			sleep 0.05
		done
	done
}
at_a() { ip netns exec $HOST_A "$@"; }
at_b() { ip netns exec $HOST_B "$@"; }

# Network namespaces as hosts, joined by pairs of interfaces. What can't be done is said, with status 1; delete_namespaces, at the end, leaves nothing.
namespaces=()
make_namespaces() { # NAME…
	local name
	[ "$(id -u)" = 0 ] || { echo "needs root for network namespaces"; return 1; }
	command -v ip >/dev/null || { echo "ip is not installed (Debian: iproute2)"; return 1; }
	for name in "$@"; do
		ip netns add $name 2>/dev/null || { echo "can't make network namespaces"; return 1; }
		namespaces+=($name)
		ip -n $name link set lo up
	done
	ip netns exec $1 true 2>/dev/null || { echo "can't run programs in a network namespace (a chroot?)"; return 1; }
}
delete_namespaces() {
	local name number
	for name in ${namespaces[@]+"${namespaces[@]}"}; do
		# The software card's counters would outlive the namespace.
		number=$(stat -L -c %i /run/netns/$name 2>/dev/null) && rm -f /dev/shm/telpher-verbs-counters-*-$number-*
		ip netns del $name 2>/dev/null
	done
	namespaces=()
}
# An interface of this name in either, A's with address 1 and B's with address 2 in each network (10.1.2. or fd12::, left out where there is no IPv6).
join_namespaces() { # A B INTERFACE MTU NETWORK…
	local a=$1 b=$2 interface=$3 mtu=$4 host=1 name network
	shift 4
	ip link add $interface netns $a type veth peer name $interface netns $b || { echo "can't make a pair of interfaces"; return 1; }
	for name in $a $b; do
		for network in "$@"; do
			case $network in
			*:*) ip -n $name addr add $network$host/64 dev $interface nodad 2>/dev/null ;;
			*) ip -n $name addr add $network$host/24 dev $interface || return 1 ;;
			esac
		done
		ip -n $name link set $interface mtu $mtu up || return 1
		host=2
	done
}
# Until each interface is up; which none is before its peer, and Linux looks at them once a second: so join all, then wait.
await_interfaces() {
	local name
	for name in "${namespaces[@]}"; do
		for _ in $(seq 1000); do
			ip -n $name link show | grep '@' | grep -v '@NONE' | grep -qv 'state UP' || break
			sleep 0.05
		done
	done
}

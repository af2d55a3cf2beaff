# Two network namespaces as two hosts, after lib_card.sh or lib_wire.sh: HOST_A (10.99.7.1, fd00:99:7::1), HOST_B (….2), joined by
# interfaces v0; at_a and at_b run a command there. The script deletes them at its end: delete_namespaces.
. "$SOURCE_DIR/tests/lib_namespaces.sh"
HOST_A=tpa$$ HOST_B=tpb$$
make_hosts() {
	make_namespaces $HOST_A $HOST_B && join_namespaces $HOST_A $HOST_B v0 4200 10.99.7. fd00:99:7:: || exit 77
	await_interfaces
}
at_a() { ip netns exec $HOST_A "$@"; }
at_b() { ip netns exec $HOST_B "$@"; }

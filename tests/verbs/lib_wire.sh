# For scripts that move data over the wire: pair SERVER_COMMAND -- CLIENT_COMMAND, each with a time limit; at and of say where.
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
[ -x "$CARD/telpher-verbs-keeper" ] || { echo "the keeper isn't built"; exit 77; }
case $card_preload in *libtsan*) echo "the thread sanitizer can't see what a socket orders"; exit 77 ;; esac
export TELPHER_VERBS_CARRIER=wire NCCL_DEBUG=WARN
WORK=$(mktemp -d)
at_server= at_client=
finish_wire() { rm -rf "$WORK"; }
trap finish_wire EXIT
# Below the range that the system gives to clients; 64 ports for each script.
TCP_PORT=$((20000 + $$ % 187 * 64))

# Runs the program twice, as server and as client of ADDRESS; fails with both outputs.
pair() {
	local address=$1 server client status
	shift
	TCP_PORT=$((TCP_PORT + 1))
	on_card timeout 120 $at_server "$@" -p $TCP_PORT >"$WORK/server" 2>&1 &
	server=$!
	for _ in $(seq 100); do
		$at_server grep -qi ":$(printf %04X $TCP_PORT) .* 0A " /proc/net/tcp /proc/net/tcp6 && break
		kill -0 $server 2>/dev/null || break
		sleep 0.05
	done
	on_card timeout 120 $at_client "$@" -p $TCP_PORT "$address" >"$WORK/client" 2>&1
	client=$?
	wait $server
	status=$?
	if [ $client != 0 ] || [ $status != 0 ]; then
		echo "--- server ($status)"; tail -20 "$WORK/server"
		echo "--- client ($client)"; tail -20 "$WORK/client"
		fail "$* [${TELPHER_VERBS_FAULT:-no faults}]"
	fi
}
# The address behind GID 0.
gid_address() {
	on_card $at_server ibv_devinfo -v | sed -n 's/.*GID\[ *0\]:[[:space:]]*::ffff:\([0-9.]*\).*/\1/p' | head -1
}

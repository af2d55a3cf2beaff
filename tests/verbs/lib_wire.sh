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
	for _ in $(seq 1000); do
		$at_server grep -qi ":$(printf %04X $TCP_PORT) .* 0A " /proc/net/tcp /proc/net/tcp6 && break
		$at_server grep -qE "@telpher-verbs/1/$(id -u)/port/[0-9a-f]+/$TCP_PORT$" /proc/net/unix && break     # -R
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
# at_once COMMAND…: four at a time, each with a folder of its own as WORK, since most of a pair's time is starting and ending; judge waits
# for what is under way, and fails with what the first bad one said.
count=0
at_once() {
	count=$((count + 1))
	TCP_PORT=$((TCP_PORT + 1))
	mkdir "$WORK/$count"
	(
		trap - EXIT
		WORK=$WORK/$count
		"$@" >"$WORK/said" 2>&1
		touch "$WORK/passed"
	) &
	[ $((count % 4)) != 0 ] || judge
}
judge() {
	local one
	wait
	for one in "$WORK"/[0-9]*; do
		[ -e "$one/said" ] || continue
		[ -e "$one/passed" ] || { cat "$one/said"; fail "see above"; }
		rm -rf "$one"
	done
}
# Until the TCP port PORT is listened on.
listened() { for _ in $(seq 1000); do grep -qi ":$(printf %04X $1) .* 0A " /proc/net/tcp /proc/net/tcp6 && return; sleep 0.05; done; fail "nobody listens on $1"; }
# Ends programs of perftest that run for a time (-D) as if it were over: each of the three parts of it ends with an alarm. (Servers of WRITEs and
# READs count no time, and an alarm would kill them.)
end_early() {
	local pid
	for _ in 1 2 3; do
		for pid in "$@"; do kill -ALRM $pid 2>/dev/null; done
		sleep 0.1
	done
}
# The address behind GID 0.
gid_address() {
	on_card $at_server ibv_devinfo -v | sed -n 's/.*GID\[ *0\]:[[:space:]]*::ffff:\([0-9.]*\).*/\1/p' | head -1
}

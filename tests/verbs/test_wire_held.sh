#!/bin/bash
# Port 4791 is somebody else's: the error names who holds it and what helps.
set -u
if [ -z "${ALONE:-}" ]; then
	unshare -n true 2>/dev/null || { echo "can't make a network namespace"; exit 77; }
	# At the same time, each in a network of its own: whoever finds the port held waits a while, for it may be about to be let go.
	for who in program user; do
		ALONE=$who unshare -n bash -c 'ip link set lo up; exec bash "$0"' "$0" & of[$!]=$who
	done
	for pid in "${!of[@]}"; do
		wait $pid || exit $?
	done
	echo "who holds the port is named"
	exit
fi
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ibv_rc_pingpong ibverbs-utils
need python3 python3-minimal
holder=
trap 'if [ -n "$holder" ]; then kill $holder; fi; finish_wire' EXIT
address=$(gid_address)
[ "$address" = 127.0.0.1 ] || { echo "GID 0 isn't lo's"; exit 77; }
refused() { # what must be said, run as
	local what=$1
	shift
	TCP_PORT=$((TCP_PORT + 1))
	"$@" timeout 60 ibv_rc_pingpong -g 0 -n 5 -p $TCP_PORT >"$WORK/server" 2>&1 & server=$!
	for _ in $(seq 1000); do grep -qi ":$(printf %04X $TCP_PORT) .* 0A " /proc/net/tcp /proc/net/tcp6 && break; sleep 0.05; done
	"$@" timeout 60 ibv_rc_pingpong -g 0 -n 5 -p $TCP_PORT $address >"$WORK/out" 2>&1 && fail "it runs although the port is held"
	wait $server && fail "the server runs although the port is held"
	cat "$WORK/server" >>"$WORK/out"
	grep -q "$what" "$WORK/out" || fail "\"$what\" isn't said: $(cat "$WORK/out")"
	grep -q 'TELPHER_VERBS_IFNAME' "$WORK/out" || fail "what helps isn't said: $(cat "$WORK/out")"
}
bound() { for _ in $(seq 1000); do grep -q ' 0100007F:12B7 ' /proc/net/udp && return; sleep 0.05; done; fail "nobody holds the port"; }

if [ "$ALONE" = program ]; then
	python3 -c 'import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("127.0.0.1", 4791)); time.sleep(100)' & holder=$!
	bound
	refused "held by process $holder (python3) of user" on_card
elif [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null; then
	# Another user's card, with its keeper.
	pair $address ibv_rc_pingpong -g 0 -n 5        # it stays for seconds
	bound
	chmod 755 "$WORK" && mkdir "$WORK/card" && cp -rL "$CARD"/. "$WORK/card" && chmod -R go+rX "$WORK/card"
	CARD=$WORK/card
	refused 'held by a process of user root: only processes of one user share it' on_card setpriv --reuid 65534 --regid 65534 --clear-groups
fi

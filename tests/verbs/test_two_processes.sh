#!/bin/bash
# Debian's programs between two processes of one machine, through `telpher verbs run`.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
[ -z "$card_preload" ] || { echo "not under a sanitizer: every program would need its runtime in front"; exit 77; }
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"; [ -z "${server:-}" ] || kill $server 2>/dev/null' EXIT
port=$((20000 + $$ % 187 * 64))    # below the range that the system gives to clients
run() { timeout 60 "$BUILD_DIR/bin/telpher" verbs run "$@"; }
pair() { # server's arguments -- client's arguments
	local arguments=()
	while [ "$1" != -- ]; do arguments+=("$1"); shift; done
	shift
	run "${arguments[@]}" >"$work/server" 2>&1 & server=$!
	for _ in $(seq 1000); do ss -Hltn 2>/dev/null | grep -q ":$port " && break; sleep 0.05; done
	run "$@" >"$work/client" 2>&1 || fail "$*: client ends with $?: $(cat "$work/client" "$work/server")"
	wait $server || fail "$*: server ends with $?: $(cat "$work/server" "$work/client")"
	server=
	port=$((port + 1))
}
tested=0
if command -v ibv_rc_pingpong >/dev/null; then
	for kind in rc uc ud srq; do
		pair ibv_${kind}_pingpong -g 0 -p $port -n 100 -- ibv_${kind}_pingpong -g 0 -p $port -n 100 localhost
	done
	tested=1
fi
if command -v ib_write_bw >/dev/null; then
	pair ib_write_bw -p $port -s 4096 -n 200 -F -- ib_write_bw -p $port -s 4096 -n 200 -F localhost
	pair ib_send_lat -p $port -n 200 -F -- ib_send_lat -p $port -n 200 -F localhost
	tested=1
fi
[ $tested = 1 ] || { echo "neither ibverbs-utils nor perftest is installed"; exit 77; }
echo "two processes talk"

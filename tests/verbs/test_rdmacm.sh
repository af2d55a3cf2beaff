#!/bin/bash
# Programs that connect by IP address (librdmacm) between two processes, and the exported names.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
[ -e "$CARD/librdmacm.so.1" ] || { echo "librdmacm isn't built (Debian: librdmacm-dev)"; exit 77; }
work=$(mktemp -d) || exit 1
server=
trap 'rm -rf "$work"; [ -z "$server" ] || kill $server 2>/dev/null' EXIT
telpher=$BUILD_DIR/bin/telpher
address=$("$telpher" verbs gids | awk '$3 == 0 && $4 ~ /:/ && $5 ~ /\./ { print $5; exit }')
[ -n "$address" ] || { echo "GID 0 has no IPv4 address"; exit 77; }
port=$((20000 + $$ % 187 * 64))    # below the range that the system gives to clients
run() ( export -f run_on_card; export BUILD_DIR CARD card_preload; exec timeout 60 bash -c 'run_on_card "$@"' run "$@" )
holds() { # is the port that ends in $1 held by a listener? Names of the card's own sockets say so.
	grep -qE "@telpher-verbs/1/$(id -u)/port/[0-9a-f]+/$1$" /proc/net/unix
}
pair() { # port, server's arguments -- client's arguments; exchange by TCP: tcp:PORT
	local arguments=() at=$1
	shift
	while [ "$1" != -- ]; do arguments+=("$1"); shift; done
	shift
	run "${arguments[@]}" >"$work/server" 2>&1 & server=$!
	for _ in $(seq 1000); do
		case $at in tcp:*) ss -Hltn 2>/dev/null | grep -q ":${at#tcp:} " && break ;; *) holds "$at" && break ;; esac
		sleep 0.05
	done
	run "$@" >"$work/client" 2>&1 || fail "$*: client ends with $?: $(cat "$work/client" "$work/server")"
	wait $server
	local status=$?
	ended_well $status "$work/server" || fail "$*: server ends with $status: $(cat "$work/server" "$work/client")"
	server=
}
# rping closes its channel while its thread for events reads it: the thread sanitizer says so, on any card. And that falls over a large block of udaddy's
# that is freed while it looks for it.
has() {
	case $1/$card_preload in rping/*libtsan* | udaddy/*libtsan*) return 1 ;; esac
	command -v "$1" >/dev/null
}
tested=0
if has rping; then
	pair $port rping -s -a "$address" -p $port -C 10 -- rping -c -a "$address" -p $port -C 10 -V
	run rping -c -a "$address" -p $((port + 1)) -C 1 >"$work/out" 2>&1
	grep -q 'REJECTED, error 8' "$work/out" || fail "a port that nobody listens on is not refused: $(cat "$work/out")"
	tested=1
fi
# A peer that is killed says nothing, and is missed all the same.
if has rping; then
	run rping -s -a "$address" -p $port -C 100000000 >"$work/server" 2>&1 & server=$!
	for _ in $(seq 1000); do holds $port && break; sleep 0.05; done
	run rping -c -a "$address" -p $port -C 100000000 >"$work/client" 2>&1 & client=$!
	# Both have exchanged something: the pair of processes has carried requests.
	pid=
	for _ in $(seq 1000); do
		for pid in $(pgrep -x rping); do grep -qz -- '^-c$' /proc/$pid/cmdline && grep -qz -- "^$port\$" /proc/$pid/cmdline && break; pid=; done 2>/dev/null
		[ -n "$pid" ] && "$telpher" verbs pairs | awk -v client="$pid" '$1 == client && $5 + $7 > 20 { found = 1 } END { exit !found }' && break
		sleep 0.05
	done
	kill -9 $pid || fail "there is no client: $(cat "$work/server" "$work/client")"
	for _ in $(seq 1000); do kill -0 $server 2>/dev/null || break; sleep 0.1; done
	kill -0 $server 2>/dev/null && fail "a killed peer isn't missed: $(cat "$work/server")"
	# Its connection manager says so, or its queue pair, whichever is first.
	grep -qE 'DISCONNECT EVENT|completion failed status (5|12)' "$work/server" || fail "a killed peer isn't missed: $(cat "$work/server")"
	wait $client $server 2>/dev/null
	server=
fi
if has ucmatose; then
	pair $port ucmatose -p $port -c 20 -- ucmatose -p $port -c 20 -s "$address"
	! has udaddy || pair 7174 udaddy -- udaddy -s "$address"
	pair $port rdma_server -p $port -- rdma_client -p $port -s "$address"
	tested=1
fi
if has ib_send_bw; then pair $port ib_send_bw -R -F -n 100 -s 4096 -p $port -- ib_send_bw -R -F -n 100 -s 4096 -p $port "$address"; fi
# libfabric takes no loopback address, which is all that a bare namespace has.
if has fi_pingpong && [ "${address#127.}" = "$address" ]; then
	pair tcp:$port fi_pingpong -p verbs -e msg -I 20 -B $port -- fi_pingpong -p verbs -e msg -I 20 -P $port "$address"
fi
# rdma-core's own tests of it: a fixed number, since that suite skips what is missing.
suite=/usr/share/doc/rdma-core/tests
if [ -d $suite ] && /usr/bin/python3 -c 'import pyverbs.cmid' 2>/dev/null; then
	cp -r $suite "$work/tests"
	gunzip -f "$work"/tests/*.gz 2>/dev/null
	(cd "$work" && TELPHER_VERBS_GIDS=all run /usr/bin/python3 tests/run_tests.py --dev telpher0 --port 1 --gid 0 -v tests.test_rdmacm) >"$work/log" 2>&1
	ok=$(grep -cE '^test_rdmacm.*ok$' "$work/log")
	! grep -q "WARNING: ThreadSanitizer" "$work/log" || fail "the thread sanitizer found something: $(cat "$work/log")"
	[ "$ok" -ge 10 ] || fail "$ok of pyverbs' 10 tests are ok: $(cat "$work/log")"
fi
names() { objdump -T "$1" | awk '$4 != "*UND*" && /RDMACM_/ { print $NF, $(NF - 1) }' | sort; }
real=$(ls /usr/lib/*/librdmacm.so.1 /usr/lib64/librdmacm.so.1 2>/dev/null | head -1)
if [ -n "$real" ] && has objdump; then
	missing=$(comm -23 <(names "$real") <(names "$CARD/librdmacm.so.1"))
	[ -z "$missing" ] || fail "exported by $real but not by ours: $missing"
fi
# Those of newer versions too.
if has objdump; then
	for name in 'rdma_query_addrinfo (RDMACM_1.4)' 'rdma_resolve_addrinfo (RDMACM_1.4)' 'rdma_write_cm_event (RDMACM_1.4)' \
		'repoll_create1 (RDMACM_1.5)' 'repoll_ctl (RDMACM_1.5)'; do
		names "$CARD/librdmacm.so.1" | tr -d '()' | grep -qx "$(tr -d '()' <<<"$name")" || fail "$name isn't exported"
	done
fi
[ $tested = 1 ] || { echo "rdmacm-utils is not installed"; exit 77; }
echo "connected"

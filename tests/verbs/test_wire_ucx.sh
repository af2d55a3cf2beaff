#!/bin/bash
# UCX's own transports over verbs, on the wire: datagrams, and reliable connections that are set up by them.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ucx_perftest ucx-utils
[ -z "$card_preload" ] || { echo "UCX isn't run beside a sanitizer's runtime"; exit 77; }
preload=$CARD/libtelpher-verbs-preload.so
[ -e "$preload" ] || { echo "the preload isn't built"; exit 77; }
run() { LD_LIBRARY_PATH=$CARD LD_PRELOAD=$preload UCX_TLS=$1 UCX_NET_DEVICES=telpher0:1 UCX_WARN_UNUSED_ENV_VARS=n timeout 60 ucx_perftest "${@:2}"; }
compare() {
	local transports=$1 server
	TCP_PORT=$((TCP_PORT + 1))
	run $transports "${@:2}" -p $TCP_PORT >"$WORK/server" 2>&1 &
	server=$!
	for _ in $(seq 1000); do
		grep -qi ":$(printf %04X $TCP_PORT) .* 0A " /proc/net/tcp /proc/net/tcp6 && break
		sleep 0.05
	done
	run $transports "${@:2}" -f -p $TCP_PORT 127.0.0.1 >"$WORK/client" 2>&1 || { tail -20 "$WORK/server" "$WORK/client"; fail "$*"; }
	wait $server || { tail -20 "$WORK/server"; fail "$* (server)"; }
}
compare ud_verbs,self -t tag_lat -s 8 -n 200 -w 10
compare ud_verbs,self -t tag_bw -s 3000 -n 200 -w 10
compare rc_verbs,ud_verbs,self -t tag_lat -s 8 -n 200 -w 10
compare rc_verbs,ud_verbs,self -t tag_bw -s 65536 -n 100 -w 10
compare rc_verbs,ud_verbs,self -t ucp_get -s 65536 -n 100 -w 10
compare rc_verbs,ud_verbs,self -t ucp_fadd -s 8 -n 100 -w 10
echo "UCX talks over the wire"

#!/bin/bash
# perftest's programs under the thread sanitizer: what our threads do beside a program's, each way, once. Other builds run them in
# verbs_wire_perftest and verbs_path_programs. Between two processes, since the sanitizer can't see what a socket within one orders.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
case $card_preload in *libtsan*) ;; *) echo "not built with the thread sanitizer"; exit 77 ;; esac
need ib_write_bw perftest
need ib_send_lat perftest
export TELPHER_VERBS_IFNAME=lo
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
port=$((20000 + $$ % 187 * 64))
count=0
# An exit status of 66 is the sanitizer's. -u 18: an error only after 8.6 s, however busy the machine is.
one() { # FOLDER PORT PROGRAM ARGUMENTS
	local at=$2 from=$1 server client
	shift 2
	run_on_card timeout 60 "$@" -F -u 18 -p "$at" >"$from/server" 2>&1 & server=$!
	for _ in $(seq 1000); do
		grep -qi ":$(printf %04X "$at") .* 0A " /proc/net/tcp /proc/net/tcp6 && break
		grep -qE "@telpher-verbs/1/$(id -u)/port/[0-9a-f]+/$at$" /proc/net/unix && break
		sleep 0.05
	done
	run_on_card timeout 60 "$@" -F -u 18 -p "$at" 127.0.0.1 >"$from/client" 2>&1
	client=$?
	wait $server && [ $client = 0 ] && touch "$from/passed"
}
judge() {
	local each
	wait
	for each in "$work"/[0-9]*; do
		[ -d "$each" ] || continue
		[ -e "$each/passed" ] || { tail -n 60 "$each/server" "$each/client"; fail "$(cat "$each/command")"; }
		rm -rf "$each"
	done
}
mode() {
	count=$((count + 1))
	mkdir "$work/$count"
	echo "$* (TELPHER_VERBS_CARRIER=$TELPHER_VERBS_CARRIER)" >"$work/$count/command"
	one "$work/$count" $((port + count)) "$@" &
	[ $((count % 4)) != 0 ] || judge
}
for TELPHER_VERBS_CARRIER in auto wire; do
	export TELPHER_VERBS_CARRIER
	mode ib_write_bw -s 5000 -n 40 -q 4 -b
	mode ib_send_bw -s 5000 -n 40 -b -e
	mode ib_send_lat -s 3000 -n 40 -e
	mode ib_send_bw -s 3000 -n 40 -R
	mode ib_read_bw -s 100000 -n 40 -b
	mode ib_atomic_bw -n 40 -q 2
	mode ib_send_bw -c UD -s 1000 -n 40 -b
	mode ib_send_bw -c XRC -s 3000 -n 40 --use-srq
	mode ib_write_bw -c UC -s 64 -n 256 -l 16
done
judge
echo "$count programs and modes ran"

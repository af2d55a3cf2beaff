#!/bin/bash
# perftest with CUDA, unmodified, over the card, with memory that only the driver's copies reach: by address and as DMA-BUF, between two
# processes by memory and by packets. PERFTEST_CUDA: a folder of programs that were built with CUDA; distributions' are not.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
programs=${PERFTEST_CUDA:-}
[ -x "$programs/ib_write_bw" ] || { echo "no perftest that was built with CUDA (PERFTEST_CUDA=FOLDER)"; exit 77; }
case $card_preload in *libtsan*) echo "the thread sanitizer can't see what a socket orders"; exit 77 ;; esac
export FAKE_CUDA_APART=1 FAKE_CUDA_DMABUF=1 CARD=$CARD:$BUILD_DIR/tests/fake_cuda
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
port=$((20000 + $$ % 187 * 64))
pair() {
	local program=$programs/$1 server client
	shift
	port=$((port + 1))
	on_card timeout 120 "$program" "$@" -p $port >"$work/server" 2>&1 & server=$!
	for _ in $(seq 1000); do
		grep -qi ":$(printf %04X $port) .* 0A " /proc/net/tcp /proc/net/tcp6 && break
		kill -0 $server 2>/dev/null || break
		sleep 0.05
	done
	on_card timeout 120 "$program" "$@" -p $port 127.0.0.1 >"$work/client" 2>&1
	client=$?
	wait $server && [ $client = 0 ] && return
	tail -5 "$work/server" "$work/client"
	fail "$program $*"
}
for how in --use_cuda=0 "--use_cuda=0 --use_cuda_dmabuf"; do
	pair ib_write_bw $how -s 65536 -n 50 -b -q 2
	pair ib_read_bw $how -s 100001 -n 20
	pair ib_send_bw $how -s 65536 -n 20
	pair ib_send_lat $how -s 8 -n 50
	TELPHER_VERBS_CARRIER=wire pair ib_write_bw $how -s 65536 -n 20
done
echo "perftest with CUDA"

#!/bin/bash
# Debian's unmodified programs talk by the short way, two processes of one machine; what they allocate may be shared memory.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ibv_rc_pingpong ibverbs-utils
need ib_write_bw perftest
export TELPHER_VERBS_CARRIER=auto NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=NET
address=$(NCCL_DEBUG=WARN gid_address)
[ -n "$address" ] || { echo "GID 0 isn't IPv4"; exit 77; }
short_way() { # as pair; and the short way was taken
	pair $address "$@"
	grep -q 'carried by path' "$WORK/client" || { grep 'carried by' "$WORK/client"; fail "$*: not by the short way"; }
}
short() { at_once short_way "$@"; }
# Under the address sanitizer, what takes another way through the card; a program that measures another thing takes none.
also() { [ -n "$card_preload" ] || short "$@"; }
short ibv_rc_pingpong -g 0 -n 100
also ibv_rc_pingpong -g 0 -n 100 -e
also ibv_uc_pingpong -g 0 -n 100
short ibv_srq_pingpong -g 0 -n 50
short ibv_xsrq_pingpong -g 0 -n 50
short ibv_ud_pingpong -g 0 -n 50
also ib_send_lat -x 0 -c UD -s 100 -n 20
for program in write read send; do
	short ib_${program}_bw -x 0 -s 50001 -n 100
	also ib_${program}_lat -x 0 -s 2 -n 20
done
also ib_atomic_bw -x 0 -n 100
short ib_atomic_lat -x 0 -n 20 -A CMP_AND_SWAP
# In the ring, beside it, and far more than it holds.
for size in 1 8192 8193 4194304; do short ib_send_bw -x 0 -s $size -n 5; done
short ib_send_bw -x 0 -c UC -s 3000 -n 100
also ib_write_bw -x 0 -c XRC -n 100
short ib_send_bw -x 0 -c XRC --use-srq -n 100
short ib_write_bw -x 0 -q 8 -s 8 -n 200 -l 8
# More queue pairs than the ring has room for: each is woken when its turn comes.
short ib_write_bw -x 0 -q 100 -s 4096 -n 100
also ib_send_bw -x 0 -b -s 65536 -n 100 -e
also ib_send_lat -x 0 --use-srq -n 20
# By events, of both directions on one channel: a reply's must not come before that of the message it replies to.
short ib_send_lat -x 0 -s 64 -n 300 -e
short ib_send_lat -x 0 -I 64 -s 64 -n 20
short ib_write_bw -x 0 -m 256 -s 5000 -n 100
judge

# Captured: an independent implementation agrees with what the packets would have been.
PYTHON=${PYTHON:-/usr/bin/python3}
if $PYTHON -c 'import scapy.contrib.roce' 2>/dev/null; then
	export TELPHER_VERBS_CAPTURE=$WORK/%p.pcapng
	short ib_send_bw -x 0 -s 9000 -n 20
	short ib_read_bw -x 0 -s 5000 -n 20
	short ib_atomic_lat -x 0 -n 20
	judge
	unset TELPHER_VERBS_CAPTURE
	$PYTHON - "$WORK"/*.pcapng <<'P' || fail "scapy doesn't agree with a capture"
import sys
from scapy.all import rdpcap, IP
from scapy.contrib.roce import BTH
count = 0
for name in sys.argv[1:]:
    for packet in rdpcap(name):
        bth = IP(bytes(packet))[BTH]
        if bth.compute_icrc(bytes(bth)[:-4]) != bytes(packet)[-4:]:
            sys.exit(1)
        count += 1
sys.exit(count < 300)
P
fi

# Memory that is born shared is mapped.
if [ -z "$card_preload" ]; then
	at_server="env TELPHER_VERBS_SHARED_ALLOC=4096" at_client="env TELPHER_VERBS_SHARED_ALLOC=4096"
	LD=$CARD/libtelpher-verbs-alloc.so
	[ -e "$LD" ] || fail "the allocator isn't built"
	on_card() { LD_LIBRARY_PATH=$CARD LD_PRELOAD=$LD "$@"; }
	short ib_write_lat -x 0 -s 8 -n 20
	short ib_atomic_bw -x 0 -n 100
	short ib_send_bw -x 0 -s 100000 -n 100
	judge
fi

# A server that is killed: its client ends at once, with an error.
TCP_PORT=$((TCP_PORT + 2))
in_card="env LD_LIBRARY_PATH=$CARD LD_PRELOAD=$card_preload ASAN_OPTIONS=detect_leaks=0"
$in_card ib_write_bw -x 0 -s 65536 -D 100 -p $TCP_PORT >"$WORK/server" 2>&1 & server=$!
for _ in $(seq 1000); do grep -qi ":$(printf %04X $TCP_PORT) .* 0A " /proc/net/tcp /proc/net/tcp6 && break; sleep 0.05; done
$in_card ib_write_bw -x 0 -s 65536 -D 100 -p $TCP_PORT $address >"$WORK/client" 2>&1 & client=$!
for _ in $(seq 1000); do grep -q 'carried by path' "$WORK/client" && break; sleep 0.05; done
sleep 1
kill -KILL $server
for _ in $(seq 1000); do kill -0 $client 2>/dev/null || break; sleep 0.05; done
kill -KILL $client 2>/dev/null && fail "the client doesn't notice that its server has died: $(tail -5 "$WORK/client")"
wait $client && fail "the client takes the death of its server for a success"
grep -q 'has died' "$WORK/client" || fail "the client ends for another reason: $(tail -5 "$WORK/client")"
echo "programs talk by the short way"

#!/bin/bash
# Whole jobs over RDMA: ranks as processes on virtual hosts and in two network namespaces, on the software card that NCCL_IB_HCA
# names (opened from its folder, nothing preloaded); every collective, one and two ports, with and without loss. LONG=1: each with each, and every type.
set -u
[ -e "$BUILD_DIR/lib/telpher-verbs/libibverbs.so.1" ] || { echo "the software card isn't built"; exit 77; }
. "$SOURCE_DIR/tests/net/lib_jobs.sh"
good() { # WHAT
	right "$1"
	grep -q 'Using network IB' "$work/out" || fail "$1: not over RDMA"
}
for what in $all; do job 2 2 $what; done
echo "ok   every collective, 2 ranks"
grep -q "NET/IB : Using \[0\]telpher0:1/RoCE (Telpher's software card)" "$work/out" || fail "the card isn't named"
for ranks in 3 5 8; do job $ranks 2 all_reduce -d bfloat16; done
job 4 4 alltoall
echo "ok   3 to 8 ranks"
most=1M TELPHER_VERBS_DEVICES=2 job 4 2 all_reduce
grep -q 'via NET/IB/1' "$work/out" || fail "the second device isn't used"
TELPHER_VERBS_DEVICES=2 NCCL_IB_HCA="telpher0, telpher1, telpher7" job 2 2 all_reduce
grep -qF 'NET/IB : Using [0]telpher0:1/RoCE [1]telpher1:1/RoCE' "$work/out" || fail "a list with blanks isn't read"
grep -q 'NCCL_IB_HCA: there is no device telpher7.*; there are: telpher0, telpher1' "$work/out" || fail "a name that no device has isn't told"
most=1M NCCL_IB_QPS_PER_CONNECTION=4 NCCL_IB_SPLIT_DATA_ON_QPS=1 job 2 2 all_gather
echo "ok   two devices, four queue pairs"
most=4M TELPHER_VERBS_DEVICES=2 NCCL_NET_FORCE_MERGE=telpher0,telpher1 job 4 2 all_reduce
grep -qF 'NET/IB : Using [0]telpher0:1+telpher1:1/RoCE' "$work/out" || fail "the devices aren't merged"
TELPHER_VERBS_PORTS=2 job 2 2 all_gather
grep -qF 'NET/IB : Using [0]telpher0:1+telpher0:2/RoCE' "$work/out" || fail "the ports of a device aren't merged"
echo "ok   merged ports"
# Larger than caches: sums are made in slots, and copied from there. (Under a sanitizer it would take a minute.)
if [ -z "${SANITIZE-}" ]; then
	least=33554436 most=33554436 calls=1 job 2 2 all_reduce
	echo "ok   large sums"
fi
TELPHER_VERBS_CARRIER=wire TELPHER_VERBS_FAULT=drop=0.01,seed=5 most=1M job 2 2 all_reduce
echo "ok   with 1 % loss"
# An hour on a busy machine. LONG_RANKS="2 8": these alone.
for ranks in ${LONG:+${LONG_RANKS:-2 3 4 5 6 7 8}}; do
	for devices in 1 2; do
		for fault in "" drop=0.01,seed=$ranks; do
			for what in $all; do
				calls=1 most=256K TELPHER_VERBS_DEVICES=$devices TELPHER_VERBS_CARRIER=wire TELPHER_VERBS_FAULT=$fault job $ranks 2 $what -d all
			done
			echo "ok   every collective and type, $ranks ranks, $devices device(s) ${fault:+with 1 % loss}"
		done
	done
done

# One host has no port: all go over sockets, and it is said why.
timeout 60 "$telpher" run -n 2 --hosts 2 -- bash -c '[ $RANK = 0 ] || export TELPHER_VERBS_STATE=down; exec "$0" perf all_reduce -b 8 -e 64K -f 64 -n 2' "$telpher" \
	>"$work/out" 2>&1 || fail "one host without a port"
grep -q 'Using network Socket' "$work/out" || fail "one host without a port: not over sockets"
grep -q "NCCL WARN rank 1 (.*) can't use network IB, which others have (no port can be used: telpher0:1 is DOWN, not ACTIVE: is its interface up (ip link), is its cable in?)" "$work/out" || fail "the reason isn't told"
NCCL_NET=IB timeout 60 "$telpher" run -n 2 --hosts 2 -- bash -c '[ $RANK = 0 ] || export TELPHER_VERBS_STATE=down; exec "$0" perf all_reduce -b 8 -e 64K -f 64 -n 2' "$telpher" \
	>"$work/out" 2>&1 && fail "NCCL_NET=IB falls back"
grep -q 'NCCL_NET=IB: that network can.t be used here.*telpher0:1 is DOWN' "$work/out" || fail "NCCL_NET=IB: the reason isn't told"
echo "ok   one host without a port"

# Hosts that differ: what both have is used.
timeout 60 "$telpher" run -n 2 --hosts 2 -- bash -c 'export TELPHER_VERBS_DEVICES=$((RANK + 1)) TELPHER_VERBS_MTU=$((1024 * (RANK + 1))); exec "$0" perf all_reduce -b 8 -e 1M -f 64 -n 2' \
	"$telpher" >"$work/out" 2>&1 || fail "hosts with different ports"
grep -q 'Out of bounds values : 0 OK' "$work/out" || fail "hosts with different ports: wrong results"
grep -q 'NCCL WARN NET/IB : rank . (.*) has . ports (.*), rank . (.*) has . (.*telpher0:1.*): what both have is used' "$work/out" || fail "that the hosts differ isn't told"
grep 'connected' "$work/out" | grep 'GID' | grep -qv 'MTU 1024' && fail "not the lesser MTU"
NCCL_IGNORE_NET_MISMATCH=0 timeout 60 "$telpher" run -n 2 --hosts 2 -- bash -c 'export TELPHER_VERBS_DEVICES=$((RANK + 1)); exec "$0" perf all_reduce -b 8 -e 64 -f 64 -n 2' \
	"$telpher" >"$work/out" 2>&1 && fail "NCCL_IGNORE_NET_MISMATCH=0 ignores it"
grep -q '^.0. telpher perf: rank 0: init: .*rank 0 (.*) has 1 devices of network IB and rank 1 (.*) has 2, and NCCL_IGNORE_NET_MISMATCH=0' "$work/out" || fail "the mismatch isn't told"
timeout 60 "$telpher" run -n 2 --hosts 2 -- bash -c 'export TELPHER_VERBS_RATE=$((100 * (RANK + 1))); exec "$0" perf all_reduce -b 8 -e 64 -f 64 -n 2' "$telpher" >"$work/out" 2>&1 ||
	fail "hosts with ports of different speeds"
grep -q 'NCCL WARN NET/IB : .*(telpher0:1 RoCE .00 Gb/s).*(telpher0:1 RoCE .00 Gb/s)' "$work/out" || fail "that the speeds differ isn't told"
echo "ok   hosts with different ports and MTUs"
timeout 60 "$telpher" run -n 3 --hosts 3 -- bash -c 'export TELPHER_VERBS_PORTS=$((RANK + 1)); exec "$0" perf all_reduce -b 8 -e 4M -f 64 -n 2' \
	"$telpher" >"$work/out" 2>&1 || fail "merged devices of different numbers of ports"
grep -q 'Out of bounds values : 0 OK' "$work/out" || fail "merged devices of different numbers of ports: wrong results"
grep -q '+telpher0:3/RoCE' "$work/out" || fail "three ports aren't merged"
echo "ok   merged devices of different numbers of ports"

make_two_hosts 97
between all_reduce
between all_gather
echo "ok   between network namespaces"
# Two networks that are routed to each other, for all that the addresses say: each port has one partner, and the merged device a second way all the same.
NCCL_IB_SUBNET_PREFIX_LEN=32 NCCL_NET_FORCE_MERGE=telpher0,telpher1 between all_reduce
standing=$(grep -c 'connected, stands by' "$work/0") using=$(grep -c 'connected$' "$work/0")
[ "$standing" -gt 0 ] && [ "$standing" = "$using" ] || fail "routed networks: $using paths in use, $standing stand by"
echo "ok   between routed networks"
# Two networks that nothing routes to each other: told before anything is sent, and the cause that the error begins with.
ip -n $a addr add 10.98.1.1/24 dev v1 && ip -n $a addr del 10.97.1.1/24 dev v1 || fail "no other address"
(fail() { exit 1; }; TELPHER_VERBS_DEVICES=1 TELPHER_VERBS_IFNAME=v1 NCCL_SOCKET_IFNAME=v0 TELPHER_IB_PATH_TIMEOUT=1500 between all_reduce) && fail "networks without a route: no error"
for rank in 0 1; do
	grep -q "NCCL WARN NET/IB : rank . .. rank ., .* : the two addresses can't reach each other: the kernel has no route from ::ffff:10.9[78].1.[12] to .*. Set NCCL_IB_GID_INDEX" "$work/$rank" ||
		fail "networks without a route: no warning of rank $rank"
	grep -q "^telpher perf: rank $rank: .*has failed, and there is no other path: the two addresses can't reach each other: the kernel has no route" "$work/$rank" ||
		fail "networks without a route: the error of rank $rank doesn't say it"
	! grep -q 'MTU 0' "$work/$rank" || fail "an MTU that isn't agreed on yet is told"
done
echo "ok   networks without a route"
# A pair of interfaces without IPv4: the port's only address that leads anywhere is IPv6.
join_namespaces $a $b v2 1500 fd97:: || exit 0
ip -n $b addr show v2 | grep -q fd97 || { echo "no IPv6 here"; exit 0; }
await_interfaces
root=[fd97::1] NCCL_SOCKET_IFNAME=v2 NCCL_SOCKET_FAMILY=AF_INET6 TELPHER_VERBS_DEVICES=1 TELPHER_VERBS_IFNAME=v2 TELPHER_VERBS_GIDS=all between all_reduce
grep -q 'GID [0-9]* fd97::1 RoCE v2' "$work/out" || fail "the IPv6 address isn't used"
echo "ok   with IPv6 alone"

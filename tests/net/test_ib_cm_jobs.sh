#!/bin/bash
# Whole jobs whose queue pairs rdma_cm connects: every collective on virtual hosts, two devices, two network namespaces, and a host without librdmacm.
set -u
telpher=$BUILD_DIR/bin/telpher
[ -e "$BUILD_DIR/lib/telpher-verbs/librdmacm.so.1" ] || { echo "the software card's librdmacm isn't built"; exit 77; }
work=$(mktemp -d)
spaces=()
cleanup() { for s in "${spaces[@]}"; do ip netns del "$s" 2>/dev/null; done; rm -rf "$work"; }
trap cleanup EXIT
fail() { echo "FAILED: $*"; grep -n "NCCL WARN" "$work/out" | head -5; tail -30 "$work/out"; exit 1; }
export NCCL_IB_HCA=telpher TELPHER_VERBS_HIDE_REAL=1 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET TELPHER_IB_CONNECT=rdma_cm
export TELPHER_IB_PATH_TIMEOUT=60000       # a busy machine is no reason to take a path for dead
# A process that gets no processor for a second is none that has been stopped, but how should the card know?
warned() { grep 'NCCL WARN' "$work/out" | grep -qv 'has served nothing for .*has it been stopped'; }
all="all_reduce all_gather reduce_scatter broadcast reduce alltoall gather scatter sendrecv"
good() { # WHAT
	grep -q 'Out of bounds values : 0 OK' "$work/out" || fail "$1: wrong results"
	grep -q 'connected by rdma_cm' "$work/out" || fail "$1: not by rdma_cm"
	grep 'NET/IB' "$work/out" | grep -q 'MTU [0-9]* connected$' && fail "$1: not all by rdma_cm"
	warned && fail "$1: a warning"
	true
}
job() { # RANKS HOSTS COLLECTIVE
	timeout 100 "$telpher" run -n $1 --hosts $2 -- "$telpher" perf $3 -b 8 -e ${most:-64K} -f 64 -n 2 -w 1 -c 1 >"$work/out" 2>&1 || fail "$3, $1 ranks on $2 hosts"
	good "$3, $1 ranks on $2 hosts"
}
for what in $all; do job 2 2 $what; job 4 4 $what; done
echo "ok   every collective, 2 and 4 ranks"
most=1M TELPHER_VERBS_DEVICES=2 NCCL_IB_QPS_PER_CONNECTION=2 job 4 2 all_reduce
grep -q 'via NET/IB/1' "$work/out" || fail "the second device isn't used"
grep -q 'connected by rdma_cm, stands by' "$work/out" || fail "no path stands by"
most=1M TELPHER_VERBS_DEVICES=2 NCCL_NET_FORCE_MERGE=telpher0,telpher1 job 2 2 all_reduce
echo "ok   two devices"
TELPHER_REPORT_PATHS=1 timeout 60 "$telpher" run -n 2 --hosts 2 -- "$telpher" perf all_reduce -b 8 -e 8 -n 1 -w 0 >"$work/out" 2>&1 || fail "the path report"
grep -q 'telpher0, GID 0 .* RoCE v2, rdma_cm' "$work/out" || fail "the path report doesn't say rdma_cm"
echo "ok   the path report"

# Who asks for it and can't have it is told; one rank's lack is told to all.
TELPHER_IB_RDMACM_LIB=/nowhere/librdmacm.so.1 NCCL_NET=IB timeout 60 "$telpher" run -n 2 --hosts 2 -- "$telpher" perf all_reduce -b 8 -e 8 -n 1 >"$work/out" 2>&1 && fail "a missing library"
grep -q 'NCCL WARN NET/IB : TELPHER_IB_CONNECT=rdma_cm: /nowhere/librdmacm.so.1: cannot open shared object file' "$work/out" || fail "a missing library isn't said"
timeout 60 "$telpher" run -n 2 --hosts 2 -- bash -c '[ $RANK = 0 ] || export TELPHER_IB_CONNECT=tcp; exec "$0" perf all_reduce -b 8 -e 8 -n 1' "$telpher" >"$work/out" 2>&1 && fail "ranks that are asked for different ways"
grep -q 'TELPHER_IB_CONNECT is rdma_cm at rank 0 (.*), and tcp at rank 1\|TELPHER_IB_CONNECT is tcp at rank 1 (.*), and rdma_cm at rank 0' "$work/out" || fail "that ranks differ isn't said"
echo "ok   refusals"

[ "$(id -u)" = 0 ] && command -v ip >/dev/null || exit 0
a=tpc$$ b=tpd$$
ip netns add $a 2>/dev/null && ip netns add $b && ip netns exec $a true 2>/dev/null || exit 0
spaces=($a $b)
for i in 0 1; do
	ip link add v$i netns $a type veth peer name v$i netns $b || exit 0
	for side in "$a 1" "$b 2"; do
		set -- $side
		ip -n $1 addr add 10.95.$i.$2/24 dev v$i && ip -n $1 link set v$i up && ip -n $1 link set lo up
	done
done
for side in $a $b; do
	for _ in $(seq 1000); do
		[ "$(ip -n $side link show | grep -c 'v[01]@.*state UP')" = 2 ] && break
		sleep 0.05
	done
done
between() { # COLLECTIVE: two ranks, one in each namespace
	local result=0 rank=0
	for space in $a $b; do
		TELPHER_RANK=$rank TELPHER_NRANKS=2 TELPHER_LOCAL_RANK=0 TELPHER_LOCAL_NRANKS=1 RANK=$rank WORLD_SIZE=2 TELPHER_JOB_SECRET="of this test" NCCL_COMM_ID=10.95.0.1:2${$: -4:4} \
			timeout 100 ip netns exec $space "$telpher" perf "$@" -b 8 -e 1M -f 64 -n 3 -w 1 >"$work/$rank" 2>&1 &
		pids[rank]=$!
		rank=$((rank + 1))
	done
	wait ${pids[0]} || result=1
	wait ${pids[1]} || result=1
	cat "$work/0" "$work/1" >"$work/out"
	[ $result = 0 ] || fail "$1 between namespaces"
	good "$1 between namespaces"
}
export TELPHER_VERBS_DEVICES=2 TELPHER_VERBS_IFNAME=v0,v1
for what in all_reduce alltoall; do between $what; done
echo "ok   between network namespaces"

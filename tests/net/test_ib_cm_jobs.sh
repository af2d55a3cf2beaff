#!/bin/bash
# Whole jobs whose queue pairs rdma_cm connects: every collective on virtual hosts, two devices, two network namespaces, and a host without librdmacm.
set -u
[ -e "$BUILD_DIR/lib/telpher-verbs/librdmacm.so.1" ] || { echo "the software card's librdmacm isn't built"; exit 77; }
. "$SOURCE_DIR/tests/net/lib_jobs.sh"
export TELPHER_IB_CONNECT=rdma_cm
calls=2
good() { # WHAT
	right "$1"
	grep -q 'connected by rdma_cm' "$work/out" || fail "$1: not by rdma_cm"
	grep 'NET/IB' "$work/out" | grep -q 'MTU [0-9]* connected$' && fail "$1: not all by rdma_cm"
	true
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

make_two_hosts 95
for what in all_reduce alltoall; do between $what; done
echo "ok   between network namespaces"

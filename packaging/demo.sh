#!/bin/bash
# The main job: four ranks as two virtual hosts train on handwritten digits, then measure all-reduce and show the paths. Between the hosts
# they use RDMA: a real card where there is one, Telpher's software card otherwise.
# usage: demo.sh BUILD_DIR
set -eu
build=$1
telpher=$build/bin/telpher
if [ -z "${NCCL_IB_HCA:-}${NCCL_NET:-}" ] && [ -e "$build/lib/telpher-verbs/libibverbs.so.1" ] && ! ls /sys/class/infiniband/* >/dev/null 2>&1; then
	export NCCL_IB_HCA=telpher
	echo "== No RDMA card here: the two virtual hosts use Telpher's software card"
fi

echo "== Four ranks on two virtual hosts learn handwritten digits (gradients through ncclAllReduce)"
"$telpher" run -n 4 --hosts 2 -- "$build/bin/digits"
echo
echo "== The same ranks measure all-reduce"
TELPHER_REPORT_PATHS=1 "$telpher" run -n 4 --hosts 2 --no-prefix -- "$telpher" perf all_reduce -b 8 -e 16M -f 8

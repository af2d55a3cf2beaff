#!/bin/bash
# Registered GPU buffers that are sent over the network from where they lie: two virtual hosts on one GPU, the software card reading GPU memory, with lending and
# without. What is run checks its results itself; this counts what was lent.
#
# Usage: lent.sh BUILD_DIR [NCCL_TESTS_DIR]
#   BUILD_DIR       of this library, with tests and kernels for the GPU
#   NCCL_TESTS_DIR  as for on_gpus.sh; without it, our own tests alone
set -u
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
nccl_tests=${2:-}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"
failed=0
export NCCL_IB_HCA=telpher TELPHER_VERBS_HIDE_REAL=1 NCCL_NET_GDR_LEVEL=SYS
[ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 0 ] || { echo "lent: this machine has no NVIDIA GPU"; exit 77; }

for name in test_cuda_lent test_cuda_lent_ends; do
	if timeout -k 5 500 "$build/tests/cuda/$name" >"$logs/$name.log" 2>&1; then
		echo "ok      $name"
	else
		echo "FAILED  $name:"
		grep -vE 'OK|RUN' "$logs/$name.log" | tail -n 20 | cut -c1-240
		failed=1
	fi
done
[ -n "$nccl_tests" ] || exit "$failed"

# Chunks that all ranks together have lent.
chunks() { cat "$logs/reg-$1."* 2>/dev/null | sed -nE 's/.* sent ([0-9]+) chunks, .* over the network from where they lay.*/\1/p' | awk '{ n += $1 } END { print n + 0 }'; }
for lend in 1 0; do
	HOSTS=2 PARTS=nccl_tests KINDS=registered RANKS=2 LOGS="$logs/lend-$lend" TELPHER_NET_LEND=$lend NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=REG \
		NCCL_DEBUG_FILE="$logs/reg-$lend.%p" bash "$here/on_gpus.sh" "$build/lib/telpher" "$nccl_tests" | sed "s/^/TELPHER_NET_LEND=$lend: /"
	[ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
	echo "TELPHER_NET_LEND=$lend: $(chunks $lend) chunks were lent"
done
[ "$(chunks 1)" -gt 0 ] || { echo "FAILED  nothing was lent"; failed=1; }
[ "$(chunks 0)" -eq 0 ] || { echo "FAILED  TELPHER_NET_LEND=0 didn't end it"; failed=1; }
echo "logs in $logs"
exit "$failed"

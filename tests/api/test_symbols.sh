#!/bin/bash
# What libnccl.so.2 exports: the original's 105 names without a version, ours with one, and nothing else; and what it needs.
set -e
lib=$BUILD_DIR/lib/telpher/libnccl.so.2
[ -e "$lib" ] || { echo "no $lib"; exit 1; }
names="AllGather AllReduce AlltoAll Bcast Broadcast CommAbort CommCount CommCuDevice CommDeregister CommDestroy CommFinalize
CommGetAsyncError CommInitAll CommInitRank CommInitRankConfig CommInitRankScalable CommRegister CommRevoke CommShrink CommSplit
CommUserRank CommWindowDeregister CommWindowRegister DevCommCreate DevCommDestroy Gather GetErrorString GetLastError GetUniqueId
GetVersion GinBarrierCreateRequirement GroupEnd GroupSimulateEnd GroupStart LLA2ACalcSlots LLA2ACreateRequirement
LsaBarrierCreateRequirement MemAlloc MemFree Recv RedOpCreatePreMulSum RedOpDestroy Reduce ReduceScatter ResetDebugInit Scatter
Send TeamLsa TeamRail TeamRankToLsa TeamRankToWorld TeamWorld"
wanted=$(for n in $names; do echo "W nccl$n"; echo "T pnccl$n"; done; echo "T ncclResetDebugInitInternal")
found=$(nm -D --defined-only "$lib" | awk '{ print $2, $3 }' | grep -v TELPHER_0.1 | grep -Ev ' (__asan|__tsan|__ubsan|__lsan|__sanitizer)' || true)
if ! diff <(sort <<< "$wanted") <(sort <<< "$found"); then echo "the exported names differ (<: wanted, >: found)"; exit 1; fi
ours=$(nm -D --defined-only "$lib" | awk '{ print $3 }' | grep TELPHER_0.1 | grep -v '^TELPHER_0.1$')
if grep -v '^telpher_.*@@TELPHER_0.1$' <<< "$ours"; then echo "these carry our version and aren't ours"; exit 1; fi
header=$(grep -o 'telpher_[a-z_]*(' "$SOURCE_DIR/include/telpher.h" | tr -d '(' | sort -u)
if ! diff <(echo "$header") <(sed 's/@@.*//' <<< "$ours" | sort -u); then echo "telpher.h and the library differ"; exit 1; fi
readelf -d "$lib" | grep -q 'SONAME.*\[libnccl.so.2\]' || { echo "the SONAME is wrong"; exit 1; }
if ! readelf -d "$lib" | grep -q san; then
	needed=$(readelf -d "$lib" | grep NEEDED | grep -Ev 'libc\.so|ld-linux' || true)
	[ -z "$needed" ] || { echo "needs more than libc: $needed"; exit 1; }
	# A program that opens the library when it runs has 1664 bytes of such memory, for all libraries that it opens.
	bytes=$((0x$(readelf -lW "$lib" | awk '$1 == "TLS" { sub("0x", "", $6); print $6 }')))
	[ $bytes -le 1280 ] || { echo "$bytes bytes of a thread's own memory, 1280 at most: dlopen fails where others need some"; exit 1; }
fi
# The header compiles as C and C++, with no CUDA on the machine.
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cat > "$dir/header.c" <<'C'
#include "nccl.h"
#include "telpher.h"
ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
#ifdef __cplusplus
static_assert(sizeof(ncclConfig_t) == 80 && sizeof(ncclUniqueId) == 128 && sizeof(ncclSimInfo_t) == 24, "ABI");
#else
_Static_assert(sizeof(ncclConfig_t) == 80 && sizeof(ncclUniqueId) == 128 && sizeof(ncclSimInfo_t) == 24, "ABI");
_Static_assert(offsetof(ncclConfig_t, netName) == 32 && offsetof(ncclConfig_t, commName) == 48 && offsetof(ncclConfig_t, nvlinkCentricSched) == 76, "ABI");
#endif
int main(void) { return ncclAllReduce == pncclAllReduce && 0; }
C
cp "$dir/header.c" "$dir/header.cc"
for compiler in "gcc -std=c17" "gcc -std=c11" "g++ -std=c++11" "clang -std=c17" "clang++ -std=c++20"; do
	command -v ${compiler%% *} > /dev/null || continue
	case $compiler in *++*) source=header.cc ;; *) source=header.c ;; esac
	$compiler -Wall -Wextra -Werror -Wno-address -Wno-tautological-compare -fsyntax-only -I "$SOURCE_DIR/include" "$dir/$source"
done
echo "exported: $(wc -l <<< "$wanted") of NCCL, $(wc -l <<< "$ours") of ours"

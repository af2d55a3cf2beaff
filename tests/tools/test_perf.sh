#!/bin/bash
# telpher perf: every collective, types and operators, as processes, threads and ranks of one thread; columns; JSON.
set -u
telpher=$BUILD_DIR/bin/telpher
fails=0
try() { # NAME COMMAND…: must succeed with no wrong element
	local name=$1 out
	shift
	if out=$("$@" 2>&1) && grep -q '# Out of bounds values : 0 OK' <<<"$out"; then echo "ok   $name"
	else echo "FAIL $name: $*"; tail -n 15 <<<"$out"; fails=$((fails + 1)); fi
}
for c in all_reduce all_gather reduce_scatter broadcast reduce alltoall gather scatter sendrecv; do
	try "$c, 3 processes on 2 virtual hosts" "$telpher" perf $c --np 3 --hosts 2 -b 4 -e 64K -f 8 -n 3 -w 1 -r -1
	try "$c, 4 threads" "$telpher" perf $c -t 4 -b 4 -e 256K -f 16 -n 3 -w 1
	try "$c, 2 threads of 2 ranks" "$telpher" perf $c -t 2 -g 2 -b 1K -e 1K -n 3 -w 1
done
try "all types and operators" "$telpher" perf all_reduce -g 3 -b 1000 -e 1000 -d all -o all -n 2 -w 1
try "all types and operators of reduce_scatter" "$telpher" perf reduce_scatter --np 2 -b 10000 -e 10000 -d all -o all -n 2 -w 1
json=${TMPDIR:-/tmp}/perf.$$.json
"$telpher" perf all_reduce -g 2 -b 8 -e 8K -f 4 -n 2 -J "$json" >/dev/null
if python3 -c 'import json,sys; d=json.load(open(sys.argv[1])); assert d["nranks"]==2 and len(d["results"])==6 and d["out_of_bounds"]==0' "$json"; then
	echo "ok   JSON"; else echo "FAIL JSON"; fails=$((fails + 1)); fi
rm -f "$json"
line=$("$telpher" perf all_reduce -g 2 -b 8 -e 8 -n 2 | grep -v '^#')
if [ "$(wc -w <<<"$line")" = 13 ]; then echo "ok   13 columns, as nccl-tests prints"; else echo "FAIL columns: $line"; fails=$((fails + 1)); fi
if "$telpher" perf all_reduce --np 2 -b 8 -e 64 -f 8 -n 2 -w 1 --vary NCCL_ALGO=RING,TREE | grep -q 'RING.*TREE'; then echo "ok   --vary"
else echo "FAIL --vary"; fails=$((fails + 1)); fi
for bad in "all_reduce -b 8x" "all_reduce -d nothing" "all_reduce -o nothing" "nothing" "all_reduce -b 64 -e 8" "all_reduce -r 5"; do
	# shellcheck disable=SC2086
	"$telpher" perf $bad >/dev/null 2>&1
	[ $? = 2 ] && echo "ok   usage error: $bad" || { echo "FAIL usage error: $bad"; fails=$((fails + 1)); }
done
exit $((fails > 0))

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
try "size 0, and from it by a factor" "$telpher" perf all_gather -g 2 -b 0 -e 64 -f 2 -n 2 -w 1
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
sizes() { "$telpher" perf "$@" -n 1 -w 0 -c 0 | awk '!/^#/ {print $1}' | tr '\n' ' '; }
expect "sizes by a factor, from 0 and by less than an element" "0 4 8 12 16 " "$(sizes all_reduce -b 0 -e 16 -f 1.1)"
expect "sizes by a step" "0 8 16 24 " "$(sizes all_reduce -b 0 -e 24 -i 8)"
try "fp8 sums of 20 ranks are checked exactly" "$telpher" perf all_reduce -g 20 -b 96 -e 96 -d fp8_e5m2 -o all -n 1 -w 0
try "-m, checked in place" "$telpher" perf all_reduce -g 2 -b 64 -e 64 -m 3 -n 2 -w 1
expect "-a 0 to 3" 4 "$(for a in 0 1 2 3; do "$telpher" perf all_reduce -t 2 -b 8 -e 8 -n 2 -a $a; done | awk '!/^#/ && $6 > 0' | wc -l | tr -d ' ')"
json=${TMPDIR:-/tmp}/perf.$$.json
"$telpher" perf sendrecv -g 2 -b 1M -e 1M -n 4 -J "$json" >/dev/null
expect "the mean is of what was measured" True "$(python3 -c 'import json,sys; d=json.load(open(sys.argv[1])); print(d["average_busbw_gbs"] == d["results"][0]["out_of_place"]["busbw_gbs"])' "$json")"
"$telpher" perf all_reduce -g 2 -b 8 -e 8K -f 4 -n 2 -J "$json" >/dev/null
if python3 -c 'import json,sys; d=json.load(open(sys.argv[1])); assert d["nranks"]==2 and len(d["results"])==6 and d["out_of_bounds"]==0' "$json"; then
	echo "ok   JSON"; else echo "FAIL JSON"; fails=$((fails + 1)); fi
"$telpher" perf sendrecv -b 8 -e 8 -n 2 -w 1 --vary NCCL_ALGO=RING,TREE -J "$json" >/dev/null
if python3 -c 'import json,sys; d=json.load(open(sys.argv[1])); assert d["vary"]=="NCCL_ALGO" and [r["value"] for r in d["runs"]]==["RING","TREE"] and d["runs"][1]["results"][0]["in_place"] is None' "$json"; then
	echo "ok   JSON of --vary"; else echo "FAIL JSON of --vary"; fails=$((fails + 1)); fi
rm -f "$json"
"$telpher" perf all_reduce -b 8 -e 8 -n 2 -J /nonexistent/file >/dev/null 2>&1
expect "a JSON file that can't be written is a failure" 1 $?
ASAN_OPTIONS="${ASAN_OPTIONS:-} allocator_may_return_null=1" TSAN_OPTIONS="${TSAN_OPTIONS:-} allocator_may_return_null=1" timeout 60 "$telpher" perf all_reduce -t 2 -b 4000000G -e 4000000G >/dev/null 2>&1
expect "a thread without memory ends the process" 1 $?
"$telpher" perf all_reduce --np 2 -b 8 -e 8 -n 2 -w 1 --vary NCCL_ALGO=RING,NONSENSE >/dev/null 2>&1
expect "a failed run of --vary is a failure" 1 $?
line=$("$telpher" perf all_reduce -g 2 -b 8 -e 8 -n 2 | grep -v '^#')
if [ "$(wc -w <<<"$line")" = 13 ]; then echo "ok   13 columns, as nccl-tests prints"; else echo "FAIL columns: $line"; fails=$((fails + 1)); fi
if "$telpher" perf all_reduce --np 2 -b 8 -e 64 -f 8 -n 2 -w 1 --vary NCCL_ALGO=RING,TREE | grep -q 'RING.*TREE'; then echo "ok   --vary"
else echo "FAIL --vary"; fails=$((fails + 1)); fi
for bad in "all_reduce -b 8x" "all_reduce -d nothing" "all_reduce -o nothing" "nothing" "all_reduce -b 64 -e 8" "all_reduce -r 5" "all_reduce -r -2" "all_reduce --vary NCCL_ALGO=" "all_reduce all_gather" "all_reduce -b 1.5M"; do
	# shellcheck disable=SC2086
	"$telpher" perf $bad >/dev/null 2>&1
	[ $? = 2 ] && echo "ok   usage error: $bad" || { echo "FAIL usage error: $bad"; fails=$((fails + 1)); }
done
exit $((fails > 0))

#!/bin/bash
# telpher run --paths: a file that others can read as JSON, of this job alone.
set -u
command -v python3 >/dev/null || exit 77
telpher=$BUILD_DIR/bin/telpher
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
fails=0
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo TELPHER_DEVICE=host
echo "an earlier job's" >"$where/paths"
"$telpher" run -n 4 --hosts 2 --paths "$where/paths" "$telpher" perf all_reduce -b 8 -e 8 -n 1 -w 0 >"$where/out" 2>&1
expect "the job runs" 0 $?
expect "a line for the communicator" 1 "$(wc -l <"$where/paths")"
expect "which JSON's readers take" "12 pairs, 8 by NET/Socket/0 on lo, 8 refusals of shared memory, 0 channels" "$(python3 -c '
import json, sys
report = json.load(open(sys.argv[1]))
paths = report["paths"]
net = [p for p in paths if p["via"] == "NET/Socket/0" and p["device"] == "lo" and not p["same_host"]]
refused = [r for p in net for r in p["refused"] if r["kind"] == "SHM/CMA" and r["code"] == "other-host" and r["why"]]
assert report["nranks"] == 4 and report["nhosts"] == 2 and [r["host"] for r in report["ranks"]] == [0, 0, 1, 1]
assert all(p["bandwidth_gbs"] > 0 and p["latency_us"] > 0 and p["gdr"] is None for p in paths)
print(f"{len(paths)} pairs, {len(net)} by NET/Socket/0 on lo, {len(refused)} refusals of shared memory, " + str(sum("channels" in p for p in paths)) + " channels")
' "$where/paths" 2>&1)"
"$telpher" run --paths /nowhere/at/all true 2>"$where/err"
expect "a file that can't be written: status" 2 $?
expect "and message" 1 "$(grep -c -- "--paths: /nowhere/at/all can't be written" "$where/err")"
mkfifo "$where/pipe"
timeout 20 "$telpher" run --paths "$where/pipe" true 2>"$where/err"
expect "a pipe that nobody reads is an error" "2 1" "$? $(grep -c -- "--paths: .*pipe can't be written" "$where/err")"
exit $((fails > 0))

#!/bin/bash
# telpher run: ranks, hosts, prefixes, the first failure, endings.
set -u
telpher=$BUILD_DIR/bin/telpher
fails=0
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}

got=$("$telpher" run -n 3 -- sh -c 'echo $TELPHER_RANK/$TELPHER_NRANKS/$RANK/$WORLD_SIZE' | sort | tr '\n' ' ')
expect "each rank knows its place and its lines carry it" "[0] 0/3/0/3 [1] 1/3/1/3 [2] 2/3/2/3 " "$got"

got=$("$telpher" run -n 5 --hosts 2 --no-prefix -- sh -c 'echo ${NCCL_HOSTID##*-}:$TELPHER_LOCAL_RANK:$TELPHER_LOCAL_NRANKS' | sort | tr '\n' ' ')
expect "virtual hosts get consecutive ranks" "0:0:3 0:1:3 0:2:3 1:0:2 1:1:2 " "$got"

err=$("$telpher" run -n 3 --grace 0.2 -- sh -c 'if [ $TELPHER_RANK = 1 ]; then exit 7; fi; sleep 60' 2>&1 >/dev/null)
expect "the first failure's status is the job's" 7 "$("$telpher" run -n 3 --grace 0.2 -- sh -c 'if [ $TELPHER_RANK = 1 ]; then exit 7; fi; sleep 60' >/dev/null 2>&1; echo $?)"
case $err in *"rank 1 "*"exit status 7"*) got=yes ;; *) got="$err" ;; esac
expect "the first failure is named with its rank" yes "$got"

"$telpher" run -n 2 --grace 0.1 -- sh -c '[ $TELPHER_RANK = 0 ] && kill -9 $$; sleep 60' >/dev/null 2>&1
expect "a signal is 128 + its number" 137 $?
"$telpher" run -n 2 --timeout 0.3 -- sleep 60 >/dev/null 2>&1
expect "--timeout ends a job with 124" 124 $?
"$telpher" run -n 2 -- /nonexistent/program >/dev/null 2>&1
expect "a program that isn't there is 127" 127 $?
"$telpher" run -n 0 -- true >/dev/null 2>&1
expect "no ranks is a usage error" 2 $?
"$telpher" run -n 2 --hosts 3 -- true >/dev/null 2>&1
expect "more hosts than ranks is a usage error" 2 $?
got=$("$telpher" run -n 2 -x GREETING=hello --no-prefix -- sh -c 'echo $GREETING' | tr '\n' ' ')
expect "-x reaches all ranks" "hello hello " "$got"
got=$(printf 'from stdin\n' | "$telpher" run -n 2 --no-prefix -- cat)
expect "rank 0 has the standard input" "from stdin" "$got"
got=$("$telpher" run -n 1 --no-prefix -- sh -c 'head -c 200000 /dev/zero | tr "\0" x; echo' | wc | tr -s ' ')
expect "a very long line stays one line" " 1 1 200001" "$got"
got=$("$telpher" run -n 1 --no-prefix -- sh -c 'head -c 3000000 /dev/zero | tr "\0" x' | tr -d '\n' | wc -c | tr -d ' ')
expect "a line of megabytes loses nothing" 3000000 "$got"
got=$("$telpher" run -n 4 -- sh -c 'seq -f %06.0f 20000' | sort | uniq | wc -l | tr -d ' ')
expect "no line is lost" 80000 "$got"

(ulimit -Sn 64; "$telpher" run -n 100 --no-prefix -- sh -c 'ulimit -Sn' | sort | uniq -c | tr -s ' ') >"$tmp/out"
expect "more ranks than descriptors allow at first; ranks get the limit as it was" " 100 64" "$(cat "$tmp/out")"
(ulimit -Sn 64; ulimit -Hn 64; "$telpher" run -n 100 -- sleep 60 >"$tmp/out" 2>&1; echo $? >>"$tmp/out")
case $(cat "$tmp/out") in *"no pipe for the output of rank "*"ulimit -n is 64"*1) got=yes ;; *) got=$(cat "$tmp/out") ;; esac
expect "too few descriptors is said, and ends what was started" yes "$got"
expect "uneven hosts are dealt as telpher explain deals them" "3 3 2 2 " "$("$telpher" explain all_reduce 4K -n 10 --hosts 4 --no-check | \
	sed -n 's/.*host [0-9]*: ranks \([0-9]*\) to \([0-9]*\).*/\1 \2/p' | awk '{print $2 - $1 + 1}' | tr '\n' ' ')"
expect "rank numbers of uneven hosts" "0:0 0:1 0:2 1:0 1:1 2:0 2:1 " \
	"$("$telpher" run -n 7 --hosts 3 --no-prefix -- sh -c 'echo ${NCCL_HOSTID##*-}:$TELPHER_LOCAL_RANK' | sort | tr '\n' ' ')"

"$telpher" run -n 2 --timeout 0.3 -- yes >/dev/null 2>&1
expect "a rank that never stops talking doesn't hold up the end" 124 $?
"$telpher" run -n 2 --no-prefix -- sh -c 'yes & exit 0' >/dev/null 2>&1
expect "nor does what a rank left running" 0 $?
"$telpher" run -n 1 --no-prefix -- sh -c '(trap "" TERM; echo $$ >'"$tmp"'/group; sleep 60 & wait; sleep 60) & sleep 60' >/dev/null 2>&1 &
job=$!
until [ -s "$tmp/group" ]; do sleep 0.02; done
kill $job
wait $job
expect "an interrupted job is 128 + the signal" 143 $?
alive() { cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | awk -v group="$1" '$3 == group && $1 != "Z"' | wc -l; }
for _ in $(seq 1000); do [ "$(alive "$(cat "$tmp/group")")" = 0 ] && break; sleep 0.05; done
expect "what ignores SIGTERM in a rank's group is killed, its rank gone or not" 0 "$(alive "$(cat "$tmp/group")")"
(trap '' HUP; exec "$telpher" run -n 1 --no-prefix -- sh -c 'echo up >'"$tmp"'/up; sleep 0.3; echo done') >"$tmp/out" 2>&1 &
job=$!
until [ -s "$tmp/up" ]; do sleep 0.02; done
kill -HUP $job
wait $job
expect "under nohup a hangup ends nothing" "0 done" "$? $(cat "$tmp/out")"
got=$("$telpher" run -n 2 --grace 5 -- sh -c '[ $TELPHER_RANK = 1 ] && kill -9 $$; exit 3' 2>&1 | grep -c 'first to fail')
expect "one failure is the first" 1 "$got"
err=$("$telpher" run -n 1 -- sh -c 'echo last words; exit 9' 2>&1 | tr '\n' ' ')
case $err in "[0] last words telpher run: rank 0 "*) got=yes ;; *) got=$err ;; esac
expect "a rank's last words come before the news of its end" yes "$got"
"$telpher" run -n 1 -- echo lost 2>/dev/null >/dev/full
expect "output that can't be written is a failure" 1 $?
touch "$tmp/plain"
"$telpher" run -n 1 -- "$tmp/plain" >/dev/null 2>&1
expect "a program that can't be run is 126" 126 $?
for bad in "--grace -1" "--timeout nan" "-x NOTHING" "--frobnicate" "-n 4 --hosts 0"; do
	# shellcheck disable=SC2086
	"$telpher" run $bad -- true >/dev/null 2>&1
	expect "usage error: $bad" 2 $?
done
exit $((fails > 0))

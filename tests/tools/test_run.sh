#!/bin/bash
# telpher run: ranks, hosts, prefixes, the first failure, endings.
set -u
telpher=$BUILD_DIR/bin/telpher
fails=0
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
got=$("$telpher" run -n 1 --no-prefix -- sh -c 'head -c 20000 /dev/zero | tr "\0" x' | tr -d '\n' | wc -c | tr -d ' ')
expect "a very long line arrives whole" 20000 "$got"
exit $((fails > 0))

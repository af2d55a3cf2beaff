#!/bin/bash
# telpher explain: the choice, its reasons, the checker's verdict, the plan, and what it says to nonsense.
set -u
telpher=$BUILD_DIR/bin/telpher
fails=0
unset NCCL_ALGO NCCL_PROTO TELPHER_TUNE_FILE
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
says() { # NAME PATTERN TEXT
	if grep -Eq -- "$2" <<<"$3"; then echo "ok   $1"; else echo "FAIL $1: no '$2' in: $3"; fails=$((fails + 1)); fi
}
explain() { "$telpher" explain "$@" 2>&1; }

out=$(explain all_reduce 4M -n 8 --hosts 2)
expect "it explains" 0 $?
says "the layout" "host 1: ranks 4 to 7" "$out"
says "one candidate is chosen" "^Chosen: [A-Z_]+, because its predicted time is the least" "$out"
expect "exactly one is marked" 1 "$(grep -c '^\* ' <<<"$out")"
says "a candidate that can't be has its reason" "BRUCK +- +- +Bruck's algorithm does all-to-all" "$out"
says "the geometry" "^Geometry: [0-9]+ rounds? of" "$out"
says "the checker's verdict" "^Checker: right result, the same bits on all ranks" "$out"
says "the plan of one rank" "rank 0 channel 0 lane 0" "$out"
expect "and only of one" 0 "$(grep -c 'rank 1 channel' <<<"$out")"
expect "twice the same" "$out" "$(explain AllReduce 4M -n 8 --hosts 2)"
times=$(awk '/^Candidates/ { on = 1 } /^Chosen/ { on = 0 } on { for (i = 1; i <= 3; i++) if ($i ~ /^[0-9]+[.][0-9]+$/) { print $i; break } }' <<<"$out")
expect "candidates are sorted" "$times" "$(sort -g <<<"$times")"

out=$(explain all_reduce 4M -n 4 --algo halving_doubling --steps)
says "--algo restricts" "^Chosen: HALVING_DOUBLING, the only" "$out"
says "--steps prints all ranks" "rank 3 channel 0 lane 0" "$out"
says "NCCL_ALGO restricts" "^Chosen: TREE" "$(NCCL_ALGO=tree explain all_reduce 4M -n 4)"
says "--rank chooses the rank" "rank 2 channel 0 lane 0" "$(explain broadcast 1K -n 4 --root 3 --rank 2)"
says "sizes are of the larger buffer" "a block of 256 KiB a rank" "$(explain all_gather 1M -n 4 --no-check)"
for coll in all_reduce all_gather reduce_scatter broadcast reduce alltoall gather scatter; do
	says "$coll is right" "^Checker: right" "$(explain $coll 64K -n 5 --hosts 2 --root 4)"
done

table=$(mktemp)
explain --table >"$table"
expect "the table it prints is one it reads" "$(cat "$table")" "$(TELPHER_TUNE_FILE=$table explain --table)"
echo "scale.RING 0.001" >>"$table"
says "a table corrects the choice" "^Chosen: RING" "$(TELPHER_TUNE_FILE=$table explain all_reduce 4M -n 4)"
echo "scale.RING fast" >>"$table"
says "a bad table is named with its line" "$table:[0-9]+: scale.RING" "$(TELPHER_TUNE_FILE=$table explain all_reduce 4M -n 4)"
rm -f "$table"

refuses() { # NAME STATUS PATTERN ARGS
	local name=$1 wanted=$2 pattern=$3 got status
	shift 3
	got=$(explain "$@")
	status=$?
	expect "$name: status" "$wanted" $status
	says "$name: message" "$pattern" "$got"
}
refuses "no such collective" 2 "all_gather, reduce_scatter" allmix 4M
refuses "no size" 2 "no size" all_reduce 4Q
refuses "too few words" 2 "a collective and a size" all_reduce
refuses "no ranks" 2 "from 1 to" all_reduce 4M -n 0
refuses "more hosts than ranks" 2 "as many hosts as ranks" all_reduce 4M -n 2 --hosts 3
refuses "a root outside" 2 "ranks are 0 to 3" broadcast 4M --root 4
refuses "no such type" 2 "no type" all_reduce 4M --type complex
refuses "no such operation" 2 "no operation" all_reduce 4M --op xor
refuses "an unknown option" 2 "--frobnicate" all_reduce 4M --frobnicate
refuses "an unknown algorithm" 1 "HALVING_DOUBLING" all_reduce 4M --algo rnig
refuses "an algorithm that can't" 1 "no algorithm/protocol available for function Broadcast" broadcast 4M --algo tree
exit $((fails > 0))

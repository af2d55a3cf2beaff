#!/bin/bash
# bench_gpu on the fake driver: that it runs, and tells the truth of what ran and of what is wrong. Times mean nothing here.
#   BUILD_DIR=build/x bench.sh; TELPHER_CUDA_LIBRARY and what else the fake needs is set
set -u
library=$BUILD_DIR/lib/telpher/libnccl.so.2
fails=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
says() { # NAME PATTERN TEXT
	if grep -Eq -- "$2" <<<"$3"; then echo "ok   $1"; else echo "FAIL $1: no '$2' in: $3"; fails=$((fails + 1)); fi
}
bench() { timeout 150 "$BUILD_DIR/bench/bench_gpu" --ours "$library" --ranks 2 --quick --calls 2 --repeats 1 --factor 64 "$@" 2>&1; }
valid_json() { # FILE: each line an object
	if command -v python3 >/dev/null; then
		python3 -c 'import json, sys
for line in open(sys.argv[1]): assert isinstance(json.loads(line), dict)' "$1"
	else
		! grep -Evq '^\{("[a-z_]+":("([^"\\]|\\.)*"|-?[0-9.]+|true|false)(,|\}$))+$' "$1"
	fi
}

said=$(bench --nccl "$library" --threads --joint --only all_reduce,send_recv --max 4K --json "$dir/joint")
expect "threads, one graph of all ranks, another library: status" 0 $?
says "a row of the graph of all" "^8 B +one graph of all +\| +[0-9.]+ +[0-9.]+ +1/1 ONE_SHOT/LL" "$said"
says "an eager call's blocks and kernels" "^8 B +eager +\| +[0-9.]+ +[0-9.]+ +1/1 ONE_SHOT/LL" "$said"
says "what its launch alone costs the host" "^8 B +eager .* of the host's, launch [0-9.]+, with event [0-9.]+, call [-+][0-9.]+$" "$said"
says "sends have theirs" "^512 B +graph +\| +[0-9.]+ +[0-9.]+ +[0-9]+/[0-9]+ SEND_RECV/" "$said"
says "one rank of either library, where the other refuses several" "all_reduce, 1 ranks" "$said"
says "its graph beside ours" "^8 B +graph +\| +[0-9.]+ .*\| +[0-9.]+ .*\| +[0-9.]+$" "$said"
says "init and memory of a communicator" "^telpher: .*init [0-9.]+ ms the first time, then [0-9.]+ .*median of 1.*MB a communicator \(largest rank\)" "$said"
valid_json "$dir/joint"
expect "each line is an object of JSON" 0 $?
json=$(cat "$dir/joint")
says "what ran is in it" '"mode":"joint".*"algorithm":"ONE_SHOT/LL","kernel":"tp_ll_f32_sum","bytes":8,.*"blocks":1,.*"sms":1,"kernels":1,"copies":0,"right":true' "$json"
says "of eager calls too" '"mode":"eager".*"kernel":"tp_ll_f32_sum"' "$json"
says "their launches too" '"mode":"eager".*"launch_us":(0\.[0-9]*[1-9]|[1-9])[0-9.]*,"launch_event_us":[0-9.]+' "$json"
says "and of communicators" '"first_init_ms":[0-9.]+,"init_ms":[0-9.]+,"inits":2,.*"memory_bytes":[0-9]+' "$json"

said=$(FAKE_CUDA_DEVICES=2 bench --nccl "$library" --only all_gather --max 8 --json "$dir/beside")
expect "processes, with and without another library: status" 0 $?
valid_json "$dir/beside"
expect "each line is an object of JSON, again" 0 $?

said=$(TELPHER_LL128=on bench --tune --max 8 --table "$dir/table")
expect "each kind of kernel alone: status" 0 $?
row() { grep -A2 "^$1, us a call/blocks" <<<"$said" | tail -1; }
says "of all-reduces, windows ran" "^8 .* [0-9.]+/1 *$" "$(row all_reduce)"
says "of sends, streams and offers ran, and no pipes" "^8 +[0-9.]+/1 +[0-9.]+/1 +none *$" "$(row send_recv)"
says "a table for such machines" '^\[gpu="Fake GPU" ranks=2 join=shared\]' "$(cat "$dir/table")"

# Each column is of the kernels of its name, those of pipes by their shared memory too.
said=$(TELPHER_LL128=on bench --tune --min 64K --max 64K)
expect "each kind of kernel alone, of larger sizes: status" 0 $?
expect "each ran as itself" "" "$(grep -w none <<<"$said")"
says "pipes with the rest: all-reduces" "^65536( +[0-9.]+/[0-9]+){7} *$" "$(row all_reduce)"
says "and sends" "^65536( +[0-9.]+/[0-9]+){3} *$" "$(row send_recv)"

for ranks in processes threads; do
	said=$(BENCH_GPU_SPOIL=1 bench --$ranks --only all_reduce --max 512 --json "$dir/wrong")
	expect "one rank of $ranks alone has a wrong result: status" 1 $?
	says "it is shown" "^512 B +eager +\| +WRONG" "$said"
	says "and named" "rank 1 of 2: all_reduce of 128 elements: element 0 of block 0 is wrong" "$said"
	says "and in the file" '"right":false' "$(cat "$dir/wrong")"
done

said=$(bench --joint)
expect "one graph of several processes: status" 2 $?
says "one graph of several processes" "--joint goes with --threads" "$said"
said=$(bench --only all_reduce,allgather)
expect "no such collective: status" 2 $?
says "no such collective" '"allgather", and knows all_reduce, all_gather,' "$said"
said=$(bench --max much)
expect "no size" 2 $?
said=$(bench --table "$dir/table")
expect "a table without --tune" 2 $?
said=$(bench --json /nonexistent/json)
expect "JSON that can't be written: status" 1 $?
says "JSON that can't be written" "/nonexistent/json can't be written: No such file" "$said"
exit $((fails > 0))

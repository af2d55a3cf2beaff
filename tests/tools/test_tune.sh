#!/bin/bash
# telpher tune: a table out of measurements that the library reads, and what it says to nonsense. Times are not judged.
set -u
telpher=$BUILD_DIR/bin/telpher
fails=0
unset NCCL_ALGO NCCL_PROTO TELPHER_TUNE_FILE
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TMPDIR=$dir
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
says() { # NAME PATTERN TEXT
	if grep -Eq -- "$2" <<<"$3"; then echo "ok   $1"; else echo "FAIL $1: no '$2' in: $3"; fails=$((fails + 1)); fi
}
small="-e 512 --rounds 1 --only alltoall"

said=$("$telpher" tune -n 3 $small,all_reduce --no-check -o "$dir/table" 2>&1)
expect "it tunes" 0 $?
says "every algorithm is measured" "all_reduce .*RING TREE .*ONE_SHOT" "$said"
says "choices before and after are shown" "^all_reduce +16 +[A-Z_]+ +[0-9.]+ +[A-Z_]+ +[A-Z_]+" "$said"
says "and what they lose" "^with the table: +predictions off by a factor of [0-9.]+; choices take" "$said"
says "the table says what it is of" "^# telpher tune, .*: 3 ranks on 1 hosts, 16 to 512 bytes" "$(cat "$dir/table")"
TELPHER_TUNE_FILE=$dir/table "$telpher" explain all_reduce 4M -n 3 >/dev/null
expect "the library reads it" 0 $?

said=$("$telpher" tune -n 2 --hosts 2 $small --launch "$telpher run -n 2 --hosts 2 --no-prefix --" --no-check 2>"$dir/err")
expect "a launcher of one's own" 0 $?
says "the table goes to the output" "^across.latency_us" "$said"

said=$("$telpher" tune -n 2 $small 2>&1)
status=$?
says "both are measured" "^alltoall +8 +[0-9.]+ +[0-9.]+ +[0-9.]+" "$said"
says "and compared" "With the table calls take 1/[0-9.]+ of the time" "$said"
if [ $status = 0 ]; then says "then the table is printed" "^scale.RING" "$said"; else says "or it says why not" "slower than before, so no table is written" "$said"; fi
expect "no file is left behind" "err table" "$(cd "$dir" && echo *)"

fake=$BUILD_DIR/tests/fake_cuda/libcuda.so.1
if [ -e "$fake" ] && [ -e "$BUILD_DIR/bench/bench_gpu" ] && [ "${SANITIZE-}" != thread ]; then
	export TELPHER_CUDA_LIBRARY=$fake TELPHER_CUDA_KERNELS=$fake TELPHER_DEVICE=cuda BENCH_GPU_TINY=1
	said=$("$telpher" tune --gpu -n 2 -b 8 -e 8 -o "$dir/kernels" 2>&1)
	expect "GPUs, by the benchmark" 0 $?
	says "the table of kernels" "TELPHER_CUDA_TABLE=one_shot=[0-9KMGnevr]+:[0-9KMGnevr]+" "$said"
	says "kinds of kernels side by side" "^bytes .*one LL .*steps .*windows" "$said"
	says "its file is for such machines" '^\[gpu="Fake GPU" ranks=2 join=shared\]$' "$(cat "$dir/kernels")"
	bench="$BUILD_DIR/bench/bench_gpu --ours $BUILD_DIR/lib/telpher/libnccl.so.2 --ranks 2 --quick --calls 1 --repeats 1 --max 8 --only all_reduce --mode eager"
	said=$(TELPHER_CUDA_TABLE=@$dir/kernels $bench 2>&1)
	expect "the library reads it" 0 $?
	said=$(TELPHER_CUDA_TABLE=@$dir/none $bench 2>&1)
	expect "and says so if there is none: status" 1 $?
	says "and says so if there is none" "TELPHER_CUDA_TABLE names .*/none, which can't be opened: No such file" "$said"
	said=$(BENCH_GPU_SPOIL=1 "$telpher" tune --gpu -n 2 -b 8 -e 8 -o "$dir/wrong" 2>&1)
	expect "wrong results: status" 1 $?
	says "wrong results are shown" "^8 .*WRONG" "$said"
	expect "and make no table" "" "$(cat "$dir/wrong")"
	said=$("$telpher" tune --gpu -n 2 -b 8 -e 8 -o /nonexistent/table 2>&1)
	expect "a table that can't be written: status" 1 $?
	says "a table that can't be written" "can't be written to /nonexistent/table: No such file" "$said"
	unset TELPHER_CUDA_LIBRARY TELPHER_CUDA_KERNELS TELPHER_DEVICE BENCH_GPU_TINY
fi

refuses() { # NAME STATUS PATTERN ARGS
	local name=$1 wanted=$2 pattern=$3 got status
	shift 3
	got=$("$telpher" tune "$@" 2>&1)
	status=$?
	expect "$name: status" "$wanted" $status
	says "$name: message" "$pattern" "$got"
}
refuses "one rank" 2 "2 to 4096 ranks" -n 1
refuses "more hosts than ranks" 2 "as many hosts as ranks" -n 2 --hosts 3
refuses "no such collective" 2 "all_gather, reduce_scatter" --only allmix
refuses "no size" 2 "takes a size" -e much
refuses "less than an element a rank" 2 "an element a rank \(16\)" -n 4 -b 8
refuses "no rounds" 2 "from 1 to" --rounds 0
refuses "a word too many" 2 "a word too many" all_reduce
refuses "no such launcher" 1 "no-such-launcher: No such file.*|the job failed" $small --launch no-such-launcher
refuses "another number of ranks" 1 "the job had 2 ranks, not the 3" -n 3 $small --launch "$telpher run -n 2 --no-prefix --"
refuses "a job that writes nothing here" 1 "rank 0 wrote no results here" $small --launch true
refuses "GPUs with what is for hosts" 2 "goes with -n, -b, -e and -o alone" --gpu --hosts 2
exit $((fails > 0))

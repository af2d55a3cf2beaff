#!/bin/bash
# Runs GPU programs that know nothing of us on our libnccl.so.2, several ranks on one GPU and one rank a GPU.
#
# Usage: on_gpus.sh LIBRARY_DIR [NCCL_TESTS_DIR]
#   LIBRARY_DIR     holds libnccl.so.2 (…/lib/telpher)
#   NCCL_TESTS_DIR  holds all_reduce_perf and the others, built with MPI=1
# What to run: PARTS="nccl_tests torch cupy jax mpi4py" (default: all), RANKS="2 4" on one GPU, of nccl-tests KINDS="sizes types unaligned
# graphs registered windows" (default: all; sizes from 8 B to LARGEST, each FACTOR times the one before). MPS is used where it can be started, but for MPS=0:
# without it, kernels of different processes take turns in slices of milliseconds. HOSTS=2: nccl-tests' ranks are on so many virtual hosts, which meet over the network: the
# software card with NCCL_IB_HCA=telpher, which reads and writes GPU memory with NCCL_NET_GDR_LEVEL=SYS. Each part prints one line: ok, FAILED or skipped.
set -u
here=$(cd "$(dirname "$0")" && pwd)
lib=$(cd "$1" && pwd)
nccl_tests=${2:-}
parts=${PARTS:-nccl_tests torch cupy jax mpi4py}
ranks=${RANKS:-2 4}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
[ "$gpus" -gt 0 ] || { echo "on_gpus: this machine has no NVIDIA GPU"; exit 77; }
export HOSTS=${HOSTS:-1}
failed=0

with_ours() { LD_PRELOAD="$lib/libnccl.so.2" LD_LIBRARY_PATH="$lib:${LD_LIBRARY_PATH:-}" "$@"; }

# part NAME SECONDS COMMAND…
part() {
	local name=$1 limit=$2 start=$SECONDS
	shift 2
	if with_ours timeout -k 5 "$limit" "$@" >"$logs/$name.log" 2>&1; then
		echo "ok      $name ($((SECONDS - start)) s)  $(tail -1 "$logs/$name.log" | cut -c1-110)"
	else
		echo "FAILED  $name, exit code $? ($((SECONDS - start)) s):"
		tail -n "${TAIL:-12}" "$logs/$name.log" | cut -c1-240 | sed 's/^/        /'
		failed=$((failed + 1))
	fi
}

start_mps() {
	export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
	if nvidia-cuda-mps-control -d >/dev/null 2>&1; then
		trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1' EXIT
	else
		unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
		echo "no MPS here: ranks that share a GPU take turns"
	fi
}

mpi() { # mpi RANKS COMMAND…
	local n=$1 on=()
	shift
	[ "${HOSTS:-1}" -gt 1 ] && on=(bash -c 'export NCCL_HOSTID=host$((OMPI_COMM_WORLD_RANK * HOSTS / OMPI_COMM_WORLD_SIZE)); exec "$@"' rank)
	mpirun --allow-run-as-root --oversubscribe --bind-to none -n "$n" -x LD_PRELOAD -x LD_LIBRARY_PATH "${on[@]}" "$@"
}

# One run of each program: nccl_tests_kind KIND RANKS "NCCL_TESTS_DEVICE=0 or nothing" TAG. Out of place and in place, every result checked.
nccl_tests_kind() {
	local kind=$1 n=$2 device=$3 tag=$4 program args
	for program in all_reduce all_gather reduce_scatter broadcast reduce alltoall alltoallv gather scatter sendrecv hypercube; do
		[ -x "$nccl_tests/${program}_perf" ] || { echo "FAILED  nccl-tests-$program: no such program in $nccl_tests"; failed=$((failed + 1)); continue; }
		[ "$program" = hypercube ] && [ $((n & (n - 1))) -ne 0 ] && continue
		case $kind in
		sizes) args="-b 8 -e ${LARGEST:-128M} -f ${FACTOR:-8} -n 5 -w 2" ;;
		types) args="-b 4 -e 4M -f 64 -n 3 -w 1 -d all" ;;
		unaligned) args="-b 64 -e 1M -f 64 -n 3 -w 1 -u 1 -d all" ;;
		graphs) args="-b 8 -e 16M -f 8 -n 5 -w 2 -G 3" ;;
		registered) args="-b 8 -e 64M -f 8 -n 5 -w 2 -R 1" ;;
		windows) args="-b 8 -e 64M -f 8 -n 5 -w 2 -R 2" ;;
		*) echo "on_gpus: '$kind' is not a kind; kinds are sizes types unaligned graphs registered windows"; exit 2 ;;
		esac
		case $kind-$program in types-all_reduce | types-reduce_scatter | types-reduce | unaligned-all_reduce) args="$args -o all" ;; esac
		part "nccl-tests-$program-$kind-$tag" 200 env $device bash -c "$(declare -f mpi); mpi $n $nccl_tests/${program}_perf $args -c 1 -g 1"
	done
}

run_nccl_tests() { # RANKS, "NCCL_TESTS_DEVICE=0" or nothing, name of the run
	local kind
	for kind in ${KINDS:-sizes types unaligned graphs registered windows}; do nccl_tests_kind "$kind" "$@"; done
}

[ "${MPS:-1}" = 0 ] || start_mps
for what in $parts; do
	case $what in
	nccl_tests)
		[ -n "$nccl_tests" ] || { echo "skipped nccl-tests: no folder given"; continue; }
		for n in $ranks; do run_nccl_tests "$n" NCCL_TESTS_DEVICE=0 "${n}on1"; done
		[ "$gpus" -gt 1 ] && run_nccl_tests "$gpus" "" "${gpus}gpus" ;;
	torch)
		for n in $ranks; do
			part "torch-calls-${n}on1" 300 python3 "$here/torch_calls.py" "$n" 1
			part "torch-train-${n}on1" 300 python3 "$here/torch_train.py" "$n" 1
		done
		[ "$gpus" -gt 1 ] && part "torch-calls-${gpus}gpus" 300 python3 "$here/torch_calls.py" "$gpus" "$gpus"
		[ "$gpus" -gt 1 ] && part "torch-train-${gpus}gpus" 300 python3 "$here/torch_train.py" "$gpus" "$gpus"
		# With this hook PyTorch 2.11 asks a communicator that has been destroyed: one generation.
		TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1 GENERATIONS=1 QUICK=1 part "torch-calls-registered" 300 python3 "$here/torch_calls.py" 2 "$([ "$gpus" -gt 1 ] && echo 2 || echo 1)"
		TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1 part "torch-train-registered" 300 python3 "$here/torch_train.py" 2 "$([ "$gpus" -gt 1 ] && echo 2 || echo 1)" ;;
	cupy)
		for n in $ranks; do part "cupy-${n}on1" 120 python3 "$here/cupy_nccl.py" "$n" 1; done
		[ "$gpus" -gt 1 ] && part "cupy-${gpus}gpus" 120 python3 "$here/cupy_nccl.py" "$gpus" "$gpus" ;;
	mpi4py) part "cupy-mpi4py" 120 bash -c "$(declare -f mpi); mpi 2 python3 $here/cupy_nccl.py --mpi $([ "$gpus" -gt 1 ] && echo 2 || echo 1)" ;;
	jax)
		part "jax-2on1" 200 python3 "$here/jax_psum.py" 2 1
		[ "$gpus" -gt 1 ] && part "jax-${gpus}gpus" 200 python3 "$here/jax_psum.py" "$gpus" "$gpus" ;;
	*) echo "on_gpus: '$what' is not a part; parts are nccl_tests torch cupy jax mpi4py"; exit 2 ;;
	esac
done
echo "logs in $logs; $failed failed"
[ "$failed" -eq 0 ]

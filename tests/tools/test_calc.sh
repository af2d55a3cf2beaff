#!/bin/bash
# telpher calc: the numbers of the articles and of NCCL, exactly; JSON; what it says to nonsense.
set -u
telpher=$BUILD_DIR/bin/telpher
fails=0
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
says() { # NAME PATTERN TEXT
	if grep -Eq -- "$2" <<<"$3"; then echo "ok   $1"; else echo "FAIL $1: no '$2' in: $3"; fails=$((fails + 1)); fi
}
calc() { "$telpher" calc "$@" 2>&1; }
value() { # NAME WANTED VALUE-NAME ARGS: the text of one value
	local name=$1 wanted=$2 which=$3
	shift 3
	expect "$name" "$wanted" "$(calc "$@" | awk -v which="$which" 'index($0, "  " which "  ") == 1 { print substr($0, 44) }')"
}
row() { # NAME PATTERN ARGS
	local name=$1 pattern=$2
	shift 2
	says "$name" "^ +$pattern *$" "$(calc "$@" | sed 's/  */ /g')"
}

# PCIe: the article's table of generations, and NCCL's own numbers beside it.
for line in '1.0 2.5 GT/s 8b/10b 0.250 4.0 5 3' '2.0 5 GT/s 8b/10b 0.500 8.0 10 6' '3.0 8 GT/s 128b/130b 0.985 15.8 16 12' \
	'4.0 16 GT/s 128b/130b 1.969 31.5 32 24' '5.0 32 GT/s 128b/130b 3.938 63.0 64 48' \
	'6.0 64 GT/s PAM4, FLIT, FEC 7.500 120.0 128 96' '7.0 128 GT/s PAM4, FLIT, FEC 15.000 240.0 256 -'; do
	row "PCIe ${line%% *}" "$line" pcie
done
value "MPS 256: 91 % is payload" "91.43 %" "payload of a write" pcie 5
value "MPS 128: less" "84.21 %" "payload of a write" pcie 5 --mps 128
value "a header of 12: 20 bytes in all" "92.75 %" "payload of a write" pcie 3 x16 --header 12
value "writes" "57.61 GB/s" "writes" pcie 5 x16
value "reads" "58.45 GB/s" "reads, by completions" pcie 5
value "half the lanes" "28.81 GB/s" "writes" pcie gen5 x8
value "reads in flight" "115" "reads in flight that fill the link" pcie 5
value "too few reads in flight" "16.38 GB/s" "reads, with these in flight" pcie 5 --outstanding 32
value "larger read requests" "32.77 GB/s" "reads, with these in flight" pcie 5 --outstanding 32 --mrrs 1024
value "as NCCL counts it" "24 GB/s" "as NCCL counts it" pcie "16 GT/s" 16
value "a FLIT has no framing of its own" "94.12 %" "payload of a write" pcie 6.0

row "NVLink 1" '1.0 Pascal 40 GB/s 4 80 GB/s 160 GB/s NRZ 20 Gb/s 18 x 4 = 72 GB/s' nvlink
row "NVLink 5" '5.0 Blackwell 100 GB/s 18 900 GB/s 1800 GB/s PAM4 212 Gb/s 40.1 x 18 = 721.8 GB/s' nvlink
value "H100" "450 GB/s" "one way" nvlink h100
value "H100, both ways" "900 GB/s" "both ways together" nvlink 4
value "H100, as NCCL counts" "370.8 GB/s" "as NCCL counts it, one way" nvlink sm90
value "A100 has 12 links" "300 GB/s" "one way" nvlink Ampere
value "A800 has 8" "160 GB/s" "as NCCL counts it, one way" nvlink A100 8
value "8 GPUs have 28 pairs" "28" "pairs" mesh 8
value "12 links for 7 peers" "5" "links left over" mesh 8 12
value "DDR5" "307.2 GB/s" "a socket's memory" memory 8 4800
row "AMD's word for NVLink" 'GPU to GPU, direct NVLink xGMI .*' terms

row "NDR" 'NDR 400 50' nic
value "HDR" "25 GB/s" "one way" nic hdr
value "an NDR card in a PCIe 4.0 slot" "31.51 GB/s" "behind this slot" nic 400G --pcie 4
value "in its own" "50 GB/s" "behind this slot" nic 400000M --pcie 5 --lanes x16
value "TCP: 1.6 TB/s of memory traffic" "1600 GB/s" "A: TCP, host memory traffic" path
value "staged: 800" "800 GB/s" "B: RDMA, staged, host memory traffic" path
value "GPUDirect: 400" "400 GB/s" "C: GPUDirect RDMA, all" path
value "A100 and HDR" "25 GB/s" "C: GPUDirect RDMA, one stream" path HDR --pcie 4
row "EFA keeps no order" 'order kept kept not kept, put right above' rdma
row "RC is what NCCL uses" 'RC yes, in order to one peer SEND, RDMA WRITE, RDMA READ, atomics .NCCL.s.' rdma
value "timeout 20" "4.295 s" "a try" qp-timeout 20
value "8 tries" "34.36 s" "until status 12 (retries exceeded)" qp-timeout 20 7
value "timeout 14" "0.06711 s" "a try" qp_timeout 14
says "timeout 0" "for ever" "$(calc qp-timeout 0)"
row "the table of timeouts" '20 4.295 s 34.36 s' qp-timeout
value "DSCP 26 is 104" "104" "traffic class" dscp 26
value "and 104 is DSCP 26" "26" "DSCP" tc 104
value "by name" "104" "traffic class" dscp af31
value "its name" "EF" "its name" tc 184
value "PXB as a level" "2" "as a level" level pxb
value "PXB as a distance" "5" "distance in logs of 2.28 to 2.30" level PXB
value "PXB in older logs" "3" "distance in older logs" level 2
value "level 5 is SYS" "SYS" "name" level 5
row "all levels" 'PHB 3 8 4 through the CPU.s root complex' level
value "cores that copy" "4 to 5" "cores that only copy" cores 400
value "cores for TCP" "14 to 40" "cores that drive TCP" cores NDR
value "a GB has 262144 pages" "262144" "pages of 4 KiB" register 1G
value "of 2 MB 512" "512" "pages of 2048 KiB" register 1G
value "with a page of one's own" "16384" "pages of 64 KiB" register 1G --page 64K

value "all-reduce of 8" "1.75" "factor" busbw all_reduce 8
value "all-gather of 4" "0.75" "factor" busbw AllGather 4
value "broadcast" "1" "factor" busbw broadcast 64
value "bus bandwidth" "375.8 GB/s" "busbw" busbw all-reduce 8 --bytes 1G --time 5000
value "a ring sends 2 (n - 1) / n" "1879048192 bytes" "a rank of a ring sends" busbw all_reduce 8 --bytes 1G
value "S*" "100 KB" "S*" s-star 2 50
value "at S* latency is half" "50 %" "share of the latency" s-star 2 51.2 --bytes 102400
value "overlap" "7 ms" "a step, all overlapped" step 7 5

out=$(calc s-star 2 50 --json | tr -d '\n\t')
says "JSON" '"values":\[\{"name":"S\*","value":100,"unit":"KB","formula":"alpha x beta = 2 us x 50 GB/s \(1 KB = 1000 bytes\)","source":"' "$out"
says "a range in JSON" '"value":[[:space:]]*\[14, 40\]' "$(calc cores 400 --json)"
if command -v python3 >/dev/null; then
	for command in pcie "pcie 5" nvlink "nvlink 4" nic path "qp-timeout" "level" "level PXB" terms busbw "cores 400" "register 1M" "mesh 8" "tc 104" rdma; do
		# shellcheck disable=SC2086
		expect "JSON of $command: values have names, tables sources and whole rows" True "$(calc $command --json | python3 -c '
import json, sys
a = json.load(sys.stdin)
print(all("name" in v and "value" in v for v in a["values"]) and bool(a["values"] or a["tables"]) and
	all(t["source"] and all(len(r) == len(t["columns"]) for r in t["rows"]) for t in a["tables"]))' 2>&1)"
	done
fi

refuses() { # NAME PATTERN ARGS: one line, status 2
	local name=$1 pattern=$2 got status
	shift 2
	got=$(calc "$@")
	status=$?
	expect "$name: status" 2 $status
	expect "$name: one line" 1 "$(wc -l <<<"$got")"
	says "$name: message" "$pattern" "$got"
}
refuses "no such command" 'no command "frob"' frob
refuses "no such option" "unknown option" pcie --frob
refuses "no such generation" '"8" is no PCIe generation' pcie 8
refuses "not a number" '"nan" is no PCIe generation' pcie nan
refuses "lanes" '"x7" is no number of lanes' pcie 5 x7
refuses "MPS" "512, 1024, 2048 or 4096" pcie 5 --mps 300
refuses "MRRS" "512, 1024, 2048 or 4096" pcie 5 --mrrs 0
refuses "header" "12 bytes .* or 16" pcie 5 --header 20
refuses "a GPU without NVLink" '"T4" is no NVLink' nvlink T4
refuses "bytes for bits" '"400GB/s" is no rate in bits' nic 400GB/s
refuses "a negative rate" '"-4" is no rate' nic -- -4
refuses "timeout" "from 0 .* to 31" qp-timeout 32
refuses "retries" "from 0 to 7" qp-timeout 20 8
refuses "traffic class" "from 0 to 255" tc 256
refuses "DSCP" "from 0 to 63" dscp 64
refuses "level" 'no level' level NVS
refuses "collective" 'no collective "frob"' busbw frob 8
refuses "ranks" '"0" is no number of ranks' busbw all_reduce 0
refuses "time without bytes" "needs --bytes" busbw all_reduce 8 --time 5
refuses "too many words" "3 words; say s-star" s-star 1 2 3
refuses "an infinite latency" '"1e999" is no latency' s-star 1e999 2
refuses "a page that is no power of two" "power of two" register 1G --page 5000
out=$(calc)
expect "alone: status" 2 $?
for command in $(grep -oE '^  [a-z-]+' <<<"$out"); do says "$command is in the page" "^\.B(R)? .*${command//-/.+}" "$(cat "$SOURCE_DIR/docs/man/telpher-calc.1")"; done
exit $((fails > 0))

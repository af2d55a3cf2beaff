#!/bin/bash
# The library exports every symbol and version that the installed one of rdma-core does, and what the table says.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
need objdump binutils

versions() { objdump -T "$1" | awk '$4 != "*UND*" && /IBVERBS/ { v = $(NF - 1); gsub(/[()]/, "", v); if ($NF !~ /^IBVERBS/) print $NF "@" v }' | sort -u; }
versions "$CARD/libibverbs.so.1" >"${TMPDIR:-/tmp}/ours.$$"
trap 'rm -f "${TMPDIR:-/tmp}/ours.$$"' EXIT

missing=$(awk -F'\t' '!/^#/ && NF == 3 {
	if ($3 == "driver") { n = $2; sub(/.*_/, "", n); print $2 "@IBVERBS_PRIVATE_" n }
	else if ($3 == "inner") next
	else if ($1 == "PRIVATE") { split("34 57 59 64 65", nodes, " "); for (i = 1; i <= 5; i++) print $2 "@IBVERBS_PRIVATE_" nodes[i] }
	else print $2 "@" $1
}' "$SOURCE_DIR/verbs/symbols.tsv" | sort -u | comm -23 - "${TMPDIR:-/tmp}/ours.$$")
[ -z "$missing" ] || fail "in the table but not exported: $missing"

real=$(ls /usr/lib/*/libibverbs.so.1 /usr/lib64/libibverbs.so.1 2>/dev/null | head -1)
if [ -n "$real" ]; then
	missing=$(versions "$real" | comm -23 - "${TMPDIR:-/tmp}/ours.$$")
	[ -z "$missing" ] || fail "exported by $real but not by ours: $missing"
fi
real=$(ls /usr/lib/*/librdmacm.so.1 /usr/lib64/librdmacm.so.1 2>/dev/null | head -1)
if [ -n "$real" ] && [ -e "$CARD/librdmacm.so.1" ]; then
	connections() { objdump -T "$1" | awk '$4 != "*UND*" && /RDMACM/ { v = $(NF - 1); gsub(/[()]/, "", v); if ($NF !~ /^RDMACM/) print $NF "@" v }' | sort -u; }
	missing=$(comm -23 <(connections "$real") <(connections "$CARD/librdmacm.so.1"))
	[ -z "$missing" ] || fail "exported by $real but not by ours: $missing"
fi
objdump -p "$CARD/libibverbs.so.1" | grep -q 'SONAME *libibverbs.so.1' || fail "the SONAME isn't libibverbs.so.1"
[ -e "$CARD/libibverbs.so" ] || fail "there is no libibverbs.so (NCCL opens that name first)"
# Nothing of ours leaks: a program's own tp_something must not meet it.
leaked=$(objdump -T "$CARD/libibverbs.so.1" | awk '$4 != "*UND*" && $NF ~ /^tp_/ && !/TELPHER_1/ { print $NF }')
[ -z "$leaked" ] || fail "exported but not of the interface: $leaked"
echo "all exported"

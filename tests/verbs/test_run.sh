#!/bin/bash
# `telpher verbs run` puts the card under a program, says why it can't, and shows the card.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
[ -z "$card_preload" ] || { echo "not under a sanitizer: every program would need its runtime in front"; exit 77; }
telpher=$BUILD_DIR/bin/telpher
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
run() { timeout 60 "$telpher" verbs run "$@"; }
refused() { # what program: refused with 126 and a reason that holds what
	run "$2" >"$work/out" 2>&1; local status=$?
	[ $status = 126 ] && grep -q "$1" "$work/out" || fail "$2 isn't refused as '$1' (status $status): $(cat "$work/out")"
}

# Programs that can't.
echo 'int main(void) { return 0; }' >"$work/a.c"
if gcc -static -o "$work/static" "$work/a.c" 2>/dev/null; then refused statically "$work/static"; fi
if gcc -Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1 -o "$work/musl" "$work/a.c" 2>/dev/null; then refused musl "$work/musl"; fi
gcc -o "$work/plain" "$work/a.c" || fail "no C compiler"
cp "$work/plain" "$work/foreign" && printf '\x16' | dd of="$work/foreign" bs=1 seek=18 conv=notrunc status=none
refused 'another processor' "$work/foreign"
head -c 30 "$work/plain" >"$work/short"; chmod +x "$work/short"
refused damaged "$work/short"
printf '#!%s\n' "$work/foreign" >"$work/script"; chmod +x "$work/script"
refused 'another processor' "$work/script"
if [ "$(id -u)" = 0 ]; then
	for bits in 4755 2755; do
		cp "$work/plain" "$work/setuid" && chown 65534:65534 "$work/setuid" && chmod $bits "$work/setuid"
		refused setuid "$work/setuid"
	done
	# Root gains nothing by a file's capabilities: it is nobody who is refused.
	cp "$work/plain" "$work/capable"
	if command -v setcap >/dev/null && command -v setpriv >/dev/null && setcap cap_net_raw+ep "$work/capable" 2>/dev/null; then
		chmod 755 "$work" && cp "$telpher" "$work/telpher"
		run "$work/capable" 2>/dev/null || fail "root can't run a program with capabilities"
		setpriv --reuid 65534 --regid 65534 --clear-groups env LD_LIBRARY_PATH="$BUILD_DIR/lib/telpher" "$work/telpher" verbs run "$work/capable" >"$work/out" 2>&1
		[ $? = 126 ] && grep -q 'has capabilities' "$work/out" || fail "a program with capabilities isn't refused: $(cat "$work/out")"
	fi
fi
run "$work/nothing" 2>/dev/null; [ $? = 127 ] || fail "a missing program doesn't give 127"

# Those that can: their status, and a word where nobody opened the card.
run "$work/plain" 2>&1 | grep -q 'had opened the software card' || fail "not opening the card isn't said"
run sh -c 'exit 7' 2>/dev/null; [ $? = 7 ] || fail "the exit status is lost"
run sh -c 'kill -9 $$' 2>/dev/null; [ $? = 137 ] || fail "the signal is lost"
TELPHER_VERBS_DEVICES=mlx5_3 run sh -c 'cat /sys/class/infiniband/mlx5_3/node_type' 2>/dev/null | grep -q CA || fail "/sys isn't shown"

# Where there is a real device nobody is moved off it unasked.
beside_real() { unshare -m sh -c 'mount -t tmpfs none /sys/class && mkdir -p /sys/class/infiniband/hca7_0 && unset TELPHER_VERBS_HIDE_REAL && exec "$@"' sh "$@"; }
if beside_real true 2>/dev/null; then
	beside_real "$telpher" verbs run "$work/plain" >"$work/out" 2>&1
	[ $? = 126 ] && grep -q 'hca7_0' "$work/out" && grep -q -- '--hide-real' "$work/out" || fail "a real device is hidden unasked: $(cat "$work/out")"
	beside_real "$telpher" verbs run --hide-real sh -c 'ls /sys/class/infiniband' >"$work/out" 2>&1 || fail "--hide-real is refused: $(cat "$work/out")"
	grep -q telpher0 "$work/out" && ! grep -q hca7_0 "$work/out" || fail "the real device isn't hidden: $(cat "$work/out")"
	if command -v ibv_devices >/dev/null; then
		LD_LIBRARY_PATH=$CARD beside_real ibv_devices >"$work/out" 2>&1 || fail "the library alone refuses"
		grep -q 'real RDMA devices (hca7_0 ' "$work/out" || fail "the library takes a real device's place without a word: $(cat "$work/out")"
	fi
fi

# The card, shown.
export TELPHER_VERBS_DEVICES=mlx5_4,mlx5_5
[ "$("$telpher" verbs devices | grep -c ACTIVE)" = 2 ] || fail "devices: $("$telpher" verbs devices)"
"$telpher" verbs gids | grep -qP '^mlx5_5\t1\t0\t[0-9a-f:]{39}\t' || fail "gids"
"$telpher" verbs gids mlx5_4 | grep -q 'n_gids_found=1' || fail "gids of one device"
"$telpher" verbs counters mlx5_4 | grep -qE 'out_of_sequence +[[:space:]][0-9]' || fail "counters"
"$telpher" verbs gids nothing >/dev/null 2>&1 && fail "a device that isn't there is shown"
unset TELPHER_VERBS_DEVICES

if command -v ibv_devinfo >/dev/null; then
	info=$(run ibv_devinfo -v 2>"$work/err") || fail "ibv_devinfo ends with $?"
	grep -q PORT_ACTIVE <<<"$info" || fail "ibv_devinfo shows no active port"
	! grep -q 'had opened' "$work/err" || fail "ibv_devinfo opened the card, and the opposite is said"
fi
echo "run, refused, shown"

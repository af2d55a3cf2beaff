#!/bin/bash
# Debian's unmodified programs see the card.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
need ibv_devinfo ibverbs-utils

export TELPHER_VERBS_DEVICES=mlx5_0,mlx5_1 TELPHER_VERBS_PORTS=2
on_card ibv_devices | grep -q mlx5_1 || fail "ibv_devices doesn't list mlx5_1"
info=$(on_card ibv_devinfo -v -d mlx5_0) || fail "ibv_devinfo ends with $?"
grep -q PORT_ACTIVE <<<"$info" || fail "ibv_devinfo shows no active port"
grep -q 'link_layer:.*Ethernet' <<<"$info" || fail "ibv_devinfo shows no Ethernet"
grep -qE 'GID\[ *0\]:.*RoCE v2' <<<"$info" || fail "ibv_devinfo shows no RoCE v2 GID"
[ "$(grep -cE '^\s*port:' <<<"$info")" = 2 ] || fail "ibv_devinfo doesn't show two ports"
unset TELPHER_VERBS_DEVICES TELPHER_VERBS_PORTS

# Every program and library that links it must load: all their symbols resolve.
for program in ib_write_bw ib_send_lat ib_read_bw ib_atomic_bw fi_info ucx_info rping; do
	path=$(command -v $program) || continue
	bad=$(on_card ldd -r "$path" 2>&1 | grep -E 'not found|undefined symbol.*ibv_')
	[ -z "$bad" ] || fail "$program: $bad"
done
if command -v fi_info >/dev/null; then on_card fi_info -l >/dev/null || fail "fi_info -l ends with $?"; fi
# UCX hooks memory calls, and so does the thread sanitizer's runtime: they don't bear each other.
if command -v ucx_info >/dev/null && [[ $card_preload != *libtsan* ]]; then on_card ucx_info -d >/dev/null || fail "ucx_info -d ends with $?"; fi
echo "programs run"

#!/bin/bash
# Programs that look into /sys/class/infiniband and /dev/infiniband past libibverbs find what a card would show there.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
case $card_preload in *libtsan*) echo "the thread sanitizer's runtime doesn't bear programs that it didn't build"; exit 77 ;; esac
export LD_LIBRARY_PATH=$CARD TELPHER_VERBS_DEVICES=mlx5_7 TELPHER_VERBS_GIDS=roce TELPHER_VERBS_PCI=0000:d7:00.0
shown() { LD_PRELOAD="$card_preload $CARD/libtelpher-verbs-preload.so" ASAN_OPTIONS=detect_leaks=0 timeout 30 "$@"; }
dir=/sys/class/infiniband/mlx5_7

[ "$(shown ls /sys/class/infiniband)" = mlx5_7 ] || fail "the class folder doesn't list the device"
[ "$(shown cat $dir/ports/1/state)" = "4: ACTIVE" ] || fail "the port isn't active"
[ "$(shown cat $dir/ports/1/gid_attrs/types/1)" = "RoCE v2" ] || fail "GID 1 has no type"
[ -n "$(shown cat $dir/ports/1/gid_attrs/ndevs/1)" ] || fail "GID 1 has no interface"
shown cat $dir/ports/1/gid_attrs/types/250 2>&1 | grep -q 'Invalid argument' || fail "an empty GID's type gives no EINVAL"
shown cat $dir/ports/1/counters/port_rcv_data | grep -qE '^[0-9]+$' || fail "a counter is no number"
shown cat $dir/ports/1/hw_counters/np_cnp_sent | grep -qE '^[0-9]+$' || fail "a hardware counter is no number"
[ "$(shown realpath $dir/device)" = /sys/devices/pci0000:d7/0000:d7:00.0 ] || fail "the device's PCI place is wrong"
[ "$(shown readlink $dir/device)" = ../../../0000:d7:00.0 ] || fail "the link to the PCI function is wrong"
[ "$(shown cat /sys/devices/pci0000:d7/0000:d7:00.0/numa_node)" = -1 ] || fail "the PCI function has no NUMA node"
shown stat -c %F /dev/infiniband/uverbs0 | grep -q 'character special' || fail "uverbs0 is no device"
shown test -r /dev/infiniband/uverbs0 -a -w /dev/infiniband/uverbs0 || fail "uverbs0 can't be read and written"
shown cat $dir/nothing 2>&1 | grep -q 'No such file' || fail "a missing file gives no ENOENT"
shown sh -c "echo 1 >$dir/node_guid" 2>&1 | grep -qi 'denied' || fail "a file can be written"
[ "$(TELPHER_VERBS_NUMA=1 shown cat /sys/devices/pci0000:d7/0000:d7:00.0/numa_node)" = 1 ] || fail "the NUMA node asked for isn't shown"
# Scripts go there; and ibstatus looks around from there.
[ "$(shown sh -c "cd $dir/ports && /bin/pwd && echo *")" = "$(printf '%s\n1' "$(shown realpath $dir/ports)")" ] || fail "one can't go there: $(shown sh -c "cd $dir/ports && /bin/pwd")"
if command -v ibstat >/dev/null; then
	shown ibstat mlx5_7 2>/dev/null | grep -q 'State: Active' || fail "ibstat shows no active port"
	[ "$(shown ibstat -l 2>/dev/null)" = mlx5_7 ] || fail "ibstat doesn't list the device"
	shown ibstatus 2>/dev/null | grep -q '4: ACTIVE' || fail "ibstatus shows no active port"
fi
# Nothing else changes.
[ "$(shown ls /sys/class/net)" = "$(ls /sys/class/net)" ] || fail "/sys/class/net changed"
[ "$(shown cat /proc/self/comm)" = cat ] || fail "other files changed"
if command -v ucx_info >/dev/null; then
	unset TELPHER_VERBS_GIDS
	list=$(shown ucx_info -d 2>/dev/null)
	grep -q rc_verbs <<<"$list" && grep -q ud_verbs <<<"$list" || fail "UCX doesn't see the card"
fi
echo "all shown"

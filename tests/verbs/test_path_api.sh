#!/bin/bash
# The verbs behave by the short way between processes as they do within one: the same tests, each QP reached as if it were another
# process's. Left out: what counts on a message having come when the post returns (channels, two of the extended queues).
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
export TELPHER_VERBS_CARRIER=path
status=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
for what in rc memory shared states ud threads changes gpu; do
	program=$BUILD_DIR/tests/verbs/test_verbs_api_$what
	[ -x "$program" ] || continue
	timeout 150 "$program" >"$work/out" 2>&1 && continue
	echo "test_verbs_api_$what ends with $?"
	grep -E 'ERROR|FAILED|LINE|anitizer|WARN|#[0-9]' "$work/out" | head -40
	status=1
done
[ $status = 0 ] || fail "by the short way"
echo "the verbs by the short way"

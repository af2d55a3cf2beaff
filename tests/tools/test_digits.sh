#!/bin/bash
# The example: four ranks on two virtual hosts learn what one rank learns.
set -u
telpher=$BUILD_DIR/bin/telpher
digits=$BUILD_DIR/bin/digits
one=$("$digits") || { echo "FAIL one rank: $one"; exit 1; }
four=$("$telpher" run -n 4 --hosts 2 --no-prefix -- "$digits") || { echo "FAIL four ranks: $four"; exit 1; }
echo "$one" | awk '/^epoch/ {print $4}' >"${TMPDIR:-/tmp}/digits-one.$$"
echo "$four" | awk '/^epoch/ {print $4}' >"${TMPDIR:-/tmp}/digits-four.$$"
paste "${TMPDIR:-/tmp}/digits-one.$$" "${TMPDIR:-/tmp}/digits-four.$$" | awk '
	{ d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || d > 1e-3 * $1 + 1e-4) { print "FAIL loss", $1, "alone,", $2, "with four"; bad = 1 } n++ }
	END { if (n < 5) { print "FAIL only", n, "losses"; bad = 1 } exit bad }'
status=$?
rm -f "${TMPDIR:-/tmp}"/digits-{one,four}.$$
[ $status = 0 ] && echo "ok   the loss curves agree"
exit $status

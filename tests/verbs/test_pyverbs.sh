#!/bin/bash
# rdma-core's own test-suite, as Debian ships it, on the software card: every name of pyverbs-ok.txt must be ok.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
. "$SOURCE_DIR/tests/verbs/lib_pyverbs.sh"
suite=/usr/share/doc/rdma-core/tests
python=/usr/bin/python3
[ -d $suite ] || { echo "rdma-core's tests are not installed (Debian: rdma-core)"; exit 77; }
$python -c 'import pyverbs.device' 2>/dev/null || { echo "pyverbs is not installed (Debian: python3-pyverbs)"; exit 77; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r $suite "$work/tests"
gunzip -f "$work"/tests/*.gz 2>/dev/null
cd "$work" || exit 1
TELPHER_VERBS_GIDS=all TELPHER_VERBS_DEVICES=telpher0 on_card $python tests/run_tests.py --dev telpher0 --port 1 --gid 0 -v >log 2>&1
names_ok log >ok
grep -v '^#' "$SOURCE_DIR/tests/verbs/pyverbs-ok.txt" | sort >wanted
missing=$(comm -13 ok wanted)
if [ -n "$missing" ]; then
	tail -60 log
	fail "not ok: $missing"
fi
! grep -q "WARNING: ThreadSanitizer" log || { grep -A40 -m1 "WARNING: ThreadSanitizer" log; fail "the thread sanitizer found something"; }
echo "$(wc -l <wanted) of $(wc -l <wanted) tests ok"

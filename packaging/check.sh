#!/bin/bash
# Runs the tests of a built preset. One that fails beside others is run once more, alone, and named: a machine that stood still
# for seconds is no reason to lose a run of 150 tests. No second chance where a sanitizer spoke or where more than two failed.
# usage: check.sh PRESET
set -u
preset=$1
temporary=build/$preset/Testing/Temporary

rm -f "$temporary/LastTestsFailed.log"
# One more than the least machine has processors: a third of what tests take is waiting.
ctest --preset "$preset" -j 3 && exit 0
status=$?
mapfile -t failed < <(sed 's/^[0-9]*://' "$temporary/LastTestsFailed.log" 2>/dev/null)
if [ ${#failed[@]} -eq 0 ] || [ ${#failed[@]} -gt 2 ] ||
	grep -qE 'ERROR: [A-Za-z]+Sanitizer|WARNING: ThreadSanitizer|runtime error:' "$temporary/LastTest.log"; then
	exit $status
fi
cp "$temporary/LastTest.log" "$temporary/FirstTest.log"
echo "== once more, alone: ${failed[*]}"
ctest --preset "$preset" --rerun-failed || exit $?
echo "== UNSTABLE: ${failed[*]} failed beside other tests and passed alone; the first run is kept in $temporary/FirstTest.log"

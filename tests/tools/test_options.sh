#!/bin/bash
# Options given twice: the last one counts, and nothing of the first is lost. The address sanitizer sees what is; the other builds only what counts.
set -u
telpher=$BUILD_DIR/bin/telpher
fails=0
unset NCCL_DEBUG
commands=(run perf explain tune topo calc env)
"$telpher" probe --help >/dev/null 2>&1 && commands+=("probe write" "probe reg" "probe connect" "probe cost" "probe matrix" "probe paths")
for command in "${commands[@]}"; do
	twice=()
	# shellcheck disable=SC2086
	for option in $("$telpher" $command --help | grep -o -- '--[a-z-]*=' | grep -v -- --env | tr -d =); do twice+=("$option=1" "$option=2"); done
	# One that returns between them.
	[ "$command" != run ] || twice=(--paths=1 --env=A=B "${twice[@]}")
	[ "$command" != env ] || twice=(--date=1 --date=2)
	# An option that there isn't ends it all once the others are read.
	# shellcheck disable=SC2086
	said=$("$telpher" $command "${twice[@]}" --nonsense 2>&1)
	status=$?
	if [ ${#twice[@]} -ge 2 ] && [ $status = 2 ] && ! grep -q Sanitizer <<<"$said"; then echo "ok   $command"
	else echo "FAIL $command ${twice[*]} --nonsense: $status, $said"; fails=$((fails + 1)); fi
done
[ "$("$telpher" perf all_reduce -b 8 -e 8 -b 64 -e 64 -n 2 -w 1 | awk '!/^#/ { print $1 }' | xargs)" = 64 ] && echo "ok   the last counts" || { echo "FAIL the last counts"; fails=$((fails + 1)); }
# What can't be printed is an error, never a silence.
full() {
	said=$("$@" 2>&1 >/dev/full)
	status=$?
	if [ $status = 1 ] && grep -q "written: No space left on device" <<<"$said"; then echo "ok   a full disk: ${*:2}"
	else echo "FAIL a full disk: ${*:2}: $status, $said"; fails=$((fails + 1)); fi
}
for command in "calc nic NDR" "env" "explain all_reduce 4K -n 2" "--help"; do
	# shellcheck disable=SC2086
	full "$telpher" $command
done
if "$telpher" probe --help >/dev/null 2>&1; then
	full "$telpher" probe cost all_reduce
	full "$telpher" probe paths dgx-h100
fi
# K, M, G and T.
"$telpher" explain all_reduce 1T -n 2 >/dev/null && echo "ok   a size of terabytes" || { echo "FAIL a size of terabytes"; fails=$((fails + 1)); }
exit $((fails > 0))

#!/bin/bash
# The manual pages: every option that --help names is in its page and no other; pages of calls are made of the headers alone.
set -u
fails=0
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
says() { # NAME PATTERN TEXT
	if grep -Eq -- "$2" <<<"$3"; then echo "ok   $1"; else echo "FAIL $1: no '$2' in: $3"; fails=$((fails + 1)); fi
}

for tool in run perf explain tune topo calc; do
	help=$("$BUILD_DIR/bin/telpher" $tool --help)
	says "--help of $tool says its name" "^Usage: telpher $tool " "$help"
	page=$(sed -n '/^\.SH OPTIONS/,/^\.SH [^O]/p' "$SOURCE_DIR/docs/man/telpher-$tool.1" | grep -A2 -E '^\.T[PQ]' | sed 's/\\-/-/g')
	expect "the page of $tool has the options of --help" "$(grep -oE '^ +(-[a-zA-Z], )?--[a-z_-]+' <<<"$help" | grep -oE -- '--[a-z_-]+' | grep -v -e --help -e --usage | sort -u)" \
		"$(grep -E '^\.BI?R? ' <<<"$page" | grep -oE -- '--[a-z_-]+' | sort -u)"
done

# Its commands have options of their own, and a section each.
for tool in write paths reg connect cost matrix; do
	"$BUILD_DIR/bin/telpher" probe --help >/dev/null || break
	help=$("$BUILD_DIR/bin/telpher" probe $tool --help)
	page=$(awk -v head=".SH OPTIONS OF ${tool^^}" '/^\.SH/ { on = $0 == head } on' "$SOURCE_DIR/docs/man/telpher-probe.1" | sed 's/\\-/-/g')
	expect "the page has the options of probe $tool --help" "$(grep -oE '^ +(-[a-zA-Z], )?--[a-z_-]+' <<<"$help" | grep -oE -- '--[a-z_-]+' | grep -v -e --help -e --usage | sort -u)" \
		"$(grep -E '^\.BI?R? ' <<<"$page" | grep -v 'telpher' | grep -oE -- '--[a-z_-]+' | sort -u)"
done

mkdir "$where/made" "$where/bad"
make_pages() { # FOLDER HEADERS
	local folder=$1
	shift
	awk -f "$SOURCE_DIR/packaging/man.awk" -v dir="$folder" -v version=9.9 -v date=2000-01-01 "$@"
}
make_pages "$where/made" "$SOURCE_DIR/include/nccl.h" "$SOURCE_DIR/include/telpher.h"
expect "pages are made" 0 $?
page=$(cat "$where/made/ncclCommInitRank.3")
says "the title" '^ncclCommInitRank, ncclCommInitRankConfig, ncclCommInitRankScalable .- join a communicator$' "$page"
says "the include" '^\.B #include <nccl.h>$' "$page"
says "the declaration" '^ncclResult_t ncclCommInitRank\(ncclComm_t \*comm, int nranks,' "$page"
says "its end" '^ +ncclUniqueId commId, int rank\);$' "$page"
says "a result of the comment" '^\\fBncclInvalidArgument\\fR$' "$(sed -n '/RETURN VALUE/,/SEE ALSO/p' <<<"$page")"
expect "which is no longer in the description" "" "$(sed -n '/DESCRIPTION/,/RETURN VALUE/p' <<<"$page" | grep ncclInvalidArgument)"
says "calls that are named lead to their pages" '^\.BR ncclCommGetAsyncError \(3\),$' "$page"
expect "a call of the same page is an alias" ".so man3/ncclCommInitRank.3" "$(cat "$where/made/ncclCommInitRankConfig.3")"
for section in NAME SYNOPSIS DESCRIPTION "SEE ALSO"; do
	expect "every page has $section" "" "$(cd "$where/made" && grep -LE "^\.(SH $section|so man3/)" -- *)"
done
expect "every page of a call has RETURN VALUE" "ncclConfig_t.3 ncclSimInfo_t.3" "$(cd "$where/made" && grep -LE '^\.(SH RETURN VALUE|so man3/)' -- * | xargs)"
expect "aliases lead to pages" "" "$(cd "$where/made" && sed -n 's|^\.so man3/||p' -- * | while read -r to; do [ -s "$to" ] || echo "$to"; done)"
if command -v mandoc >/dev/null; then
	mkdir "$where/man3"
	cp "$where"/made/* "$where/man3"
	expect "mandoc finds nothing" "" "$(cd "$where" && mandoc -Tlint -W warning man3/*.3 "$SOURCE_DIR"/docs/man/*.1 "$BUILD_DIR"/man/*.7 2>&1 | grep -v 'so is fragile')"
fi
printf '/* Head.\n *\n * Every call returns a result. */\nncclResult_t nccl_bad(int a);\n' >"$where/bad.h"
out=$(make_pages "$where/bad" "$where/bad.h" 2>&1)
expect "a call without a comment fails" 1 $?
says "and is named" "bad.h:4: nccl_bad has no title" "$out"
exit $((fails > 0))

#!/bin/bash
# telpher env: every registered parameter with its value and origin, NCCL's names, what is set and unknown; never a secret.
set -u
telpher=$BUILD_DIR/bin/telpher
fails=0
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
for name in $(env | sed -n 's/^\(\(NCCL\|TELPHER\)_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done
export HOME=$where
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
says() { # NAME PATTERN TEXT
	if grep -Eq -- "$2" <<<"$3"; then echo "ok   $1"; else echo "FAIL $1: no '$2' in: $3"; fails=$((fails + 1)); fi
}
line() { grep -E "^  $1 " <<<"$2" | head -1; }

out=$("$telpher" env)
expect "it lists" 0 $?
folders=("$SOURCE_DIR/src")
grep -q '^The software card' <<<"$out" && folders+=("$SOURCE_DIR/verbs")
registered=$(grep -rhoE '\.name = "(NCCL|TELPHER)_[A-Z0-9_]+"' "${folders[@]}" --include='*.c' | sed 's/.*"\(.*\)"/\1/' | sort)
expect "a parameter is registered once" "" "$(uniq -d <<<"$registered")"
printed=$(grep -oE '^  (NCCL|TELPHER)_[A-Z0-9_]+' <<<"$out" | tr -d ' ')
expect "every registered parameter is there" "$registered" "$(sort <<<"$printed")"
expect "every one has an origin" "$(wc -l <<<"$registered")" "$(grep -cE '^  (NCCL|TELPHER)_[A-Z0-9_]+ .* default$' <<<"$out")"
expect "every one has a line that says what it is" "" \
	"$(awk 'wanted && !/^      [^ ]/ { print last } { wanted = /^  (NCCL|TELPHER)_/; last = $1 }' <<<"$out")"
expect "a section is printed once" "" "$(grep -E '^[A-Z]' <<<"$out" | sort | uniq -d)"
expect "every section has a title" "" "$(grep -E '^[a-z]' <<<"$out")"
says "a range and a default" "\(1 to 1000000; default 1800\)" "$(grep -A2 TELPHER_INIT_TIMEOUT <<<"$out")"
expect "no line is wider than 100 columns" "" "$(LC_ALL=C.UTF-8 awk 'length($0) > 100 && !/…/' <<<"$out")"
expect "no line ends with a space" "" "$(grep -E ' $' <<<"$out")"

out=$(NCCL_SHM_DISABLE=1 TELPHER_DEVICE=host "$telpher" env)
says "a value from the environment" "^  NCCL_SHM_DISABLE +1 +environment$" "$out"
says "another" "^  TELPHER_DEVICE +host +environment$" "$out"
says "an empty text is told from an unset one" "^  NCCL_ALGO +\(empty\) +environment$" "$(NCCL_ALGO='' "$telpher" env)"

echo "NCCL_SHM_DISABLE=1" >"$where/.nccl.conf"
says "a value from ~/.nccl.conf" "^  NCCL_SHM_DISABLE +1 +$where/.nccl.conf$" "$("$telpher" env)"
printf 'TELPHER_INIT_TIMEOUT = 77 # seconds\nTELPHER_INIT_TIMEOOT=1\n' >"$where/other.conf"
out=$(NCCL_CONF_FILE=$where/other.conf "$telpher" env)
says "a value from the file that NCCL_CONF_FILE names" "^  TELPHER_INIT_TIMEOUT +77 +$where/other.conf$" "$out"
says "which is read instead of ~/.nccl.conf" "^  NCCL_SHM_DISABLE +0 +default$" "$out"
says "an unknown name in a file" "^  unknown +TELPHER_INIT_TIMEOOT +did you mean TELPHER_INIT_TIMEOUT\?" "$out"
says "and which file that is" "$where/other.conf\)$" "$(grep -A2 TIMEOOT <<<"$out")"
says "the environment wins" "^  TELPHER_INIT_TIMEOUT +78 +environment$" "$(TELPHER_INIT_TIMEOUT=78 NCCL_CONF_FILE=$where/other.conf "$telpher" env)"
rm "$where/.nccl.conf"

out=$(TELPHER_JOB_SECRET="open sesame" "$telpher" env 2>&1)
expect "a secret isn't printed" 0 "$(grep -c sesame <<<"$out")"
says "but that it is set" "^  TELPHER_JOB_SECRET +\(not shown\) +environment$" "$out"

out=$(NCCL_SOKCET_IFNAME=lo TELPHER_XYZZY_QUUX=1 NCCL_VERSION=2.28.9-1 NCCL_ALGO=ring "$telpher" env --names)
says "a misspelt name" "^  unknown +NCCL_SOKCET_IFNAME +did you mean NCCL_SOCKET_IFNAME\?" "$out"
says "a name like no other" "^  unknown +TELPHER_XYZZY_QUUX +nothing reads it" "$out"
expect "variables of images are left alone" 0 "$(grep -c NCCL_VERSION <<<"$out")"
says "a file that ranks take" "^  honoured +NCCL_TOPO_FILE *$" "$out"
for name in NET_GDR_LEVEL NET_GDR_READ NET_FORCE_FLUSH GDR_FLUSH_DISABLE CROSS_NIC NETDEVS_POLICY; do
	says "a name that changes how data goes: $name" "^  honoured +NCCL_$name *\$" "$out"
done
says "a name that changes reports alone" "^  honoured +NCCL_PXN_DISABLE +in what is reported and expected, not in" "$out"
says "a name that is honoured and set" "^  honoured +NCCL_ALGO +\(set\)$" "$out"
says "a name without effect has its reason" "^  no effect +NCCL_NET_MERGE_POLICY +ports are merged by distance" "$out"
expect "--names prints only names" 0 "$(grep -c '^  TELPHER_' <<<"$out")"
names=$(sed -n 's/.*{ "\(NCCL_[A-Z0-9_]*\)", .*/\1/p' "$SOURCE_DIR/src/base/env_names.c")
expect "all of NCCL's names are there" "$names" "$("$telpher" env --names | grep -oE '^  (honoured|no effect) +NCCL_[A-Z0-9_]+' | awk '{ print $NF }')"
expect "honoured are those that are registered" "$(grep -xF "$names" <<<"$registered")" \
	"$("$telpher" env --names | awk '$1 == "honoured" { print $2 }')"
expect "no name is left to a part that isn't there" 0 "$("$telpher" env --names | tr -s ' \n' ' ' | grep -c "isn't in this program")"
expect "nothing unknown is set here" 0 "$("$telpher" env | grep -c '^Set, and unknown')"

page=$("$telpher" env --man)
expect "the manual page has every parameter" "$registered" "$(sed -n 's/^\.B \(\(NCCL\|TELPHER\)_[A-Z0-9_]*\)$/\1/p' <<<"$page" | sort -u)"
says "and is one" "^\.TH TELPHER" "$page"
out=$("$telpher" env --frobnicate 2>&1)
expect "an unknown option: status" 2 $?
says "an unknown option: message" "frobnicate" "$out"
"$telpher" env everything >/dev/null 2>&1
expect "too many words" 2 $?
exit $((fails > 0))

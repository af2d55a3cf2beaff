# rdma-core's own test-suite, after lib_card.sh: names_ok LOG prints the names of the tests that were ok, sorted, as pyverbs-ok.txt has them.
names_ok() {
	awk '
		match($0, /^test_[a-zA-Z0-9_]+ \(tests\.[A-Za-z0-9_.]+\)/) {
			name = $2; gsub(/[()]/, "", name); sub(/^tests\./, "", name)
			# Before Python 3.11 the name ends with the class.
			if (name !~ ("\\." $1 "$")) name = name "." $1
		}
		/ \.\.\. ok$|^ok$/ { if (name != "") print name; name = "" }
		/ \.\.\. (ERROR|FAIL|skipped)/ { name = "" }
	' "$1" | sort
}

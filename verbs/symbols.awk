# From symbols.tsv: the version script (-v what=map), the stubs (-v what=stubs), or the macro that gives a private function a
# name under every private node (-v what=header).
BEGIN { FS = "\t"; split("34 57 59 64 65", nodes, " ") }
/^#/ || NF < 3 { next }
{ count++; version[count] = $1; name[count] = $2; kind[count] = $3; if ($1 ~ /^IBVERBS/ && !($1 in seen)) { seen[$1] = 1; order[++norder] = $1 } }

function later(a, b) { split(a, x, "."); split(b, y, "."); return x[2] + 0 > y[2] + 0 }
function sort_versions(	i, j, t) {
	for (i = 2; i <= norder; i++)
		for (j = i; j > 1 && later(order[j - 1], order[j]); j--) { t = order[j]; order[j] = order[j - 1]; order[j - 1] = t }
}
function print_map(	i, k, base, inner) {
	sort_versions()
	for (i = 1; i <= norder; i++) {
		print order[i] " {"
		print "\tglobal:"
		for (k = 1; k <= count; k++)
			if (version[k] == order[i] && kind[k] == "call") print "\t\t" name[k] ";"
		print "}" (base == "" ? "" : " " base) ";"
		base = order[i]
	}
	# Here, not in IBVERBS_1.0: a node's local pattern would hide what .symver puts into it.
	print "TELPHER_1 {"
	inner = 0
	for (k = 1; k <= count; k++)
		if (kind[k] == "inner") { if (!inner++) print "\tglobal:"; print "\t\t" name[k] ";" }
	print "\tlocal: *;"
	print "};"
	for (i = 1; i in nodes; i++) {
		print "IBVERBS_PRIVATE_" nodes[i] " {"
		for (k = 1; k <= count; k++)
			if (kind[k] == "driver" && name[k] == "verbs_register_driver_" nodes[i]) print "\tglobal: " name[k] ";"
		print "};"
	}
}
function give(symbol, alias, node) { print "__asm__(\".symver " symbol ", " alias "@" node "\");" }
function print_stubs(	k, i, f) {
	print "/* Generated from verbs/symbols.tsv. */"
	print "#include <errno.h>"
	print "#include \"verbs/stubs.h\""
	for (k = 1; k <= count; k++) {
		if (kind[k] == "old") {
			f = "tp_old_" name[k]
			print "TP_STUB long " f "(void);\nlong " f "(void) { return tp_stub_old(\"" name[k] "\"); }"
			give(f, name[k], version[k])
		} else if (kind[k] == "driver") {
			print "TP_STUB void " name[k] "(void);\nvoid " name[k] "(void) {}"
		} else if (kind[k] == "refuse" || kind[k] == "data") {
			for (i = 1; i in nodes; i++) {
				f = "tp_private_" name[k] "_" nodes[i]
				if (kind[k] == "data")
					print "TP_STUB extern _Bool " f ";\n_Bool " f ";"
				else
					print "TP_STUB long " f "(void);\nlong " f "(void) { return tp_stub_refuse(\"" name[k] "\"); }"
				give(f, name[k], "IBVERBS_PRIVATE_" nodes[i])
			}
		}
	}
}
function print_header(	i) {
	print "/* Generated from verbs/symbols.tsv: TP_PRIVATE(name) exports tp_private_<name> as name under every private node. */"
	print "#define TP_PRIVATE_NODE(name, node) \\"
	print "\textern __typeof__(tp_private_##name) tp_private_##name##_##node __attribute__((alias(\"tp_private_\" #name), visibility(\"default\"))); \\"
	print "\t__asm__(\".symver tp_private_\" #name \"_\" #node \", \" #name \"@IBVERBS_PRIVATE_\" #node)"
	printf "#define TP_PRIVATE(name)"
	for (i = 1; i in nodes; i++) printf "%s TP_PRIVATE_NODE(name, %s)", (i == 1 ? "" : ";"), nodes[i]
	print ""
}
END {
	if (what == "map") print_map()
	else if (what == "stubs") print_stubs()
	else if (what == "header") print_header()
}

# Manual pages (section 3) from the comments of the public headers, which stay the only text there is.
#
#   awk -f man.awk -v dir=man3 -v version=0.1.0 -v date=2026-11-29 nccl.h telpher.h
#
# Lines without a blank one between them are one page. Its first comment, directly before another, is the title; further ones
# before the last are about the whole page; the last before a call is the call's. Sentences that begin with a result
# ("ncclSystemError: …") are the return values. Indented lines of a comment stay as they are. The page is named after its
# first call, other calls of it lead there, and telpher(3) has the headers' first comments, the results and the list of pages.
# POSIX awk only: what a bare Debian has is mawk.

function fail(text) { print "man.awk: " FILENAME ":" FNR ": " text > "/dev/stderr"; failed = 1; exit 1 }

function escape(text)
{
	gsub(/\\/, "\\e", text)
	gsub(/-/, "\\-", text)
	return text
}

# Names of calls, constants and variables in bold, calls of other pages with their section.
function mark(text, page,    out, word)
{
	out = ""
	while (match(text, /`[^`]*`|p?nccl[A-Z][A-Za-z0-9_]*|telpher_[a-z_]+|(NCCL|TELPHER)_[A-Z0-9_]+/)) {
		word = substr(text, RSTART, RLENGTH)
		out = out substr(text, 1, RSTART - 1)
		text = substr(text, RSTART + RLENGTH)
		if (word == "`telpher explain`") seen["telpher\\-explain(1)"] = 1
		if (word ~ /^(NCCL_[A-Z]*_?ID|NCCL_SOCKET_|NCCL_DEBUG|TELPHER_)/) seen["telpher\\-env(7)"] = 1
		gsub(/`/, "", word)
		if (word in page_of) {
			out = out "\\fB" word "\\fR" (page_of[word] == page ? "" : "(3)")
			if (page_of[word] != page) seen[word "(3)"] = 1
		} else {
			out = out "\\fB" word "\\fR"
		}
	}
	return out text
}

# One sentence a line; a line that would be a request isn't one.
function put(text, page)
{
	text = mark(escape(text), page)
	gsub(/[.] +/, ".\n", text)
	gsub(/\n[.]/, "\n\\\\\\&.", text)
	gsub(/\n'/, "\n\\\\\\&'", text)
	if (text ~ /^[.']/) text = "\\&" text
	print text > file
}

# The results of a text go to `results`, one a line; the rest is returned.
function take_results(text,    n, i, sentence, rest, parts, word)
{
	n = split(text, parts, /[.] +/)
	rest = ""
	for (i = 1; i <= n; i++) {
		sentence = parts[i] (i < n ? "." : "")
		word = sentence
		sub(/[ :].*/, "", word)
		if (word in is_result && sentence ~ /^nccl[A-Za-z]+( or nccl[A-Za-z]+)*: /) results = results sentence "\n"
		else rest = rest (rest == "" ? "" : " ") sentence
	}
	return rest
}

# `begun`: text of the same section stands before.
function put_comment(text, page, begun,    n, i, lines, paragraph, verbatim)
{
	n = split(text "\n", lines, "\n")
	paragraph = ""; verbatim = 0
	for (i = 1; i <= n; i++) {
		if (lines[i] != "" && lines[i] !~ /^  /) {
			if (verbatim) { print ".EE\n.RE" > file; verbatim = 0 }
			paragraph = paragraph (paragraph == "" ? "" : " ") lines[i]
			continue
		}
		if (paragraph != "") {
			paragraph = take_results(paragraph)
			if (paragraph != "") {
				if (begun) print ".PP" > file
				put(paragraph, page)
				begun = 1
			}
			paragraph = ""
		}
		if (lines[i] != "") {
			if (!verbatim) print ".sp\n.RS 4\n.EX" > file
			verbatim = 1
			sub(/^ +/, "", lines[i])
			print escape(lines[i]) > file
		}
	}
	if (verbatim) print ".EE\n.RE" > file
}

# A declaration, broken at commas.
function put_prototype(text,    n, i, parts, line, piece)
{
	n = split(text, parts, /, */)
	line = ""
	for (i = 1; i <= n; i++) {
		piece = parts[i] (i < n ? "," : "")
		if (line != "" && length(line) + length(piece) > 72) { print escape(line) > file; line = "       " }
		line = line (line == "" || line == "       " ? "" : " ") piece
	}
	print escape(line) > file
}

function end_block(    i)
{
	if (ncomments > 0 && nfunctions + (type != "") > 0) fail("a comment at the end of a block")
	if (title != "" && (nfunctions || type != "")) {
		name = nfunctions ? functions[1] : type
		pages[++npages] = name
		titles[name] = title; intros[name] = intro; types[name] = type_text; headers[name] = FILENAME; members[name] = nfunctions
		sub(/.*\//, "", headers[name])
		for (i = 1; i <= nfunctions; i++) {
			member[name, i] = functions[i]
			page_of[functions[i]] = name
		}
		if (!nfunctions) page_of[type] = name
	} else if (nfunctions) {
		fail(functions[1] " has no title")
	}
	ncomments = nfunctions = 0
	title = intro = type = type_text = ""
}

# Of the comments that wait, the last is this call's.
function take_comments(name,    i, last)
{
	i = 1
	if (!nfunctions && title == "") {
		if (ncomments < 2) fail(name " has no title or no text")
		title = comments[i++]
	}
	last = name == "" ? ncomments : ncomments - 1
	for (; i <= last; i++) intro = intro (intro == "" ? "" : "\n\n") comments[i]
	if (name != "") {
		if (i > ncomments) fail(name " has no text of its own")
		texts[name] = comments[i]
	}
	ncomments = 0
}

function declare(text,    name)
{
	if (text ~ /^TP_NCCL_CALL_/) {
		sub(/^TP_NCCL_CALL_\(/, "", text)
		sub(/\)$/, "", text)
		match(text, /, [A-Za-z0-9_]+, /)
		name = substr(text, RSTART + 2, RLENGTH - 4)
		text = substr(text, 1, RSTART - 1) " " name substr(text, RSTART + RLENGTH) ";"
	} else {
		match(text, /[A-Za-z0-9_]+\(/)
		name = substr(text, RSTART, RLENGTH - 1)
	}
	sub(/\* ncc/, "*ncc", text); sub(/\* telpher/, "*telpher", text)
	take_comments(name)
	functions[++nfunctions] = name
	prototypes[name] = text
}

FNR == 1 { end_block(); nheads++; started = 0 }

in_comment || /^\/\*/ {
	line = $0
	first = !in_comment
	if (first) { comment = ""; in_comment = 1 }
	sub(/^(\/\*| \*) ?/, "", line)
	if (line ~ /\*\/$/) { in_comment = 0; sub(/ *\*\/$/, "", line) }
	if (line !~ /^SPDX/) comment = comment (comment == "" ? "" : "\n") line
	if (!in_comment) {
		if (started) comments[++ncomments] = comment
		else { heads[nheads] = comment; started = 1 }
	}
	next
}
/^$/ && !in_type && declaration == "" {
	if (nfunctions || type != "") end_block()
	ncomments = 0
	next
}
in_type || /^typedef struct [A-Za-z0-9_]* *\{$|^typedef struct \{$/ {
	if (!in_type) take = ncomments
	in_type = 1
	type_text = type_text $0 "\n"
	if (/^\}/) {
		in_type = 0
		type = $0
		sub(/^\} */, "", type); sub(/;.*/, "", type)
		if (take > 1) take_comments("")
		else type = type_text = ""
		ncomments = 0
	}
	next
}
/^typedef enum \{$/ { in_enum = 1 }
in_enum && /^\tncclSuccess/ { in_results = 1 }
in_results && /\/\*/ {
	line = $0
	sub(/^\t/, "", line)
	result = line; sub(/ .*/, "", result)
	sub(/.*\/\* */, "", line); sub(/ *\*\/.*/, "", line)
	is_result[result] = 1
	result_list = result_list result "\t" line "\n"
}
/^\}/ { in_enum = in_results = 0 }
declaration != "" || /^TP_NCCL_CALL_\(/ || /^(ncclResult_t|const char \*|void) ?[a-z_]+\(/ {
	line = $0
	sub(/^\t+/, " ", line)
	declaration = declaration line
	if (line ~ /\);?$/) { declare(declaration); declaration = "" }
	next
}
{ if (!nfunctions) ncomments = 0 }

function begin_page(name, what)
{
	file = dir "/" name ".3"
	print ".\\\" Made from the headers' comments by packaging/man.awk." > file
	print ".TH " name " 3 \"" date "\" \"telpher " version "\"\n.SH NAME" > file
	print what > file
}

function put_see_also(    n, i, k, list, swap, key)
{
	n = 0
	for (key in seen) list[++n] = key
	for (i = 1; i < n; i++)
		for (k = i + 1; k <= n; k++)
			if (list[k] < list[i]) { swap = list[i]; list[i] = list[k]; list[k] = swap }
	print ".SH SEE ALSO" > file
	for (i = 1; i <= n; i++) {
		key = list[i]
		sub(/\(/, " (", key)
		print ".BR " key (i < n ? "," : "") > file
	}
}

function put_results(name,    n, i, lines, key, text)
{
	print ".SH RETURN VALUE" > file
	if (prototypes[name] ~ /^void/) print "None." > file
	else if (prototypes[name] !~ /^ncclResult_t/) print "The text that is described above; it isn't to be freed." > file
	else put(every, name)
	n = split(results, lines, "\n")
	for (i = 1; i < n; i++) {
		key = text = lines[i]
		sub(/:.*/, "", key); sub(/^[^:]*: */, "", text)
		if (text !~ /[.]$/) text = text "."
		print ".TP" > file
		put(key, name)
		put(text, name)
	}
}

function put_page(name,    i, names, results_of)
{
	for (i in seen) delete seen[i]
	names = members[name] ? member[name, 1] : name
	for (i = 2; i <= members[name]; i++) names = names ", " member[name, i]
	begin_page(name, names " \\- " tolower(substr(titles[name], 1, 1)) substr(titles[name], 2))
	print ".SH SYNOPSIS\n.nf\n.B #include <" headers[name] ">" > file
	print ".PP\n.ft B" > file
	if (types[name] != "") { i = types[name]; gsub(/\t/, "    ", i); printf "%s", escape(i) > file; if (members[name]) print "" > file }
	for (i = 1; i <= members[name]; i++) put_prototype(prototypes[member[name, i]])
	print ".ft R\n.PP\nLink with \\fB\\-lnccl\\fR: cc file.c $(pkg\\-config \\-\\-cflags \\-\\-libs telpher)\n.fi" > file
	print ".SH DESCRIPTION" > file
	results = ""
	if (intros[name] != "") put_comment(intros[name], name, 0)
	for (i = 1; i <= members[name]; i++) {
		if (members[name] > 1) print ".SS " member[name, i] > file
		put_comment(texts[member[name, i]], name, members[name] == 1 && intros[name] != "")
	}
	if (members[name]) put_results(name)
	seen["telpher(3)"] = 1
	put_see_also()
	close(file)
	for (i = 2; i <= members[name]; i++) {
		file = dir "/" member[name, i] ".3"
		print ".so man3/" name ".3" > file
		close(file)
	}
}

function put_overview(    i, n, lines, parts, names)
{
	for (i in seen) delete seen[i]
	begin_page("telpher", "telpher, nccl.h, telpher.h \\- collective communication over host memory")
	print ".SH SYNOPSIS\n.nf\n.B #include <nccl.h>\n.B #include <telpher.h>\n.PP" > file
	print "Link with \\fB\\-lnccl\\fR: cc file.c $(pkg\\-config \\-\\-cflags \\-\\-libs telpher)\n.fi\n.SH DESCRIPTION" > file
	for (i = 1; i <= nheads; i++) put_comment(heads[i], "telpher", i > 1)
	print ".SH CALLS AND STRUCTURES" > file
	for (i = 1; i <= npages; i++) {
		names = "\\fB" pages[i] "\\fR(3)"
		for (n = 2; n <= members[pages[i]]; n++) names = names ", \\fB" member[pages[i], n] "\\fR(3)"
		print ".TP\n" names > file
		put(titles[pages[i]] ".", "telpher")
	}
	print ".SH RETURN VALUE" > file
	n = split(result_list, lines, "\n")
	for (i = 1; i < n; i++) {
		split(lines[i], parts, "\t")
		print ".TP\n.B " parts[1] > file
		put(toupper(substr(parts[2], 1, 1)) substr(parts[2], 2) ".", "telpher")
	}
	for (i in seen) delete seen[i]
	seen["telpher(1)"] = seen["telpher\\-env(7)"] = 1
	put_see_also()
	close(file)
}

END {
	if (failed) exit 1
	end_block()
	n = split(heads[1], lines, "\n")
	for (i = 1; i <= n; i++) {
		if (lines[i] ~ /^Every call returns /) in_every = 1
		if (lines[i] == "") in_every = 0
		if (in_every) every = every (every == "" ? "" : " ") lines[i]
	}
	sub(/ Each call exists twice.*/, "", every)
	if (every == "" || result_list == "") { print "man.awk: no results in " ARGV[1] > "/dev/stderr"; exit 1 }
	for (i = 1; i <= npages; i++) put_page(pages[i])
	put_overview()
}

/* `telpher topo svg` and `html`: the machine as a picture that needs nothing else. Links are coloured by kind and as wide as they
 * carry; channels are drawn over it, each in a colour of its own, and switched on and off by a click. */
#include "topo_draw.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "topo/search.h"

static const struct { enum tp_topo_link_kind kind; const char *class, *name, *colour; } kinds[] = {
	{ TP_WIRE_NVL, "nvl", "NVLink", "#2e9e4f" }, { TP_WIRE_C2C, "c2c", "C2C", "#8e44ad" }, { TP_WIRE_PCI, "pci", "PCIe", "#2f6fb7" },
	{ TP_WIRE_SYS, "sys", "CPU to CPU", "#8a8f98" }, { TP_WIRE_NET, "net", "network port", "#d9822b" },
};

static double thickness(double bw)
{
	return bw >= 5000 ? 1.2 : fmin(1.2 + 0.42 * sqrt(bw), 13);
}

static void put(FILE *out, const char *text)
{
	for (; *text; text++) {
		if (*text == '&') fputs("&amp;", out);
		else if (*text == '<') fputs("&lt;", out);
		else if (*text == '>') fputs("&gt;", out);
		else if (*text == '"') fputs("&quot;", out);
		else fputc(*text, out);
	}
}

static void draw_text(FILE *out, double x, double y, const char *class, const char *text)
{
	fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">", x, y, class);
	put(out, text);
	fputs("</text>\n", out);
}

static const char *class_of(enum tp_topo_link_kind kind)
{
	for (size_t i = 0; i < TP_ARRAY_LEN(kinds); i++)
		if (kinds[i].kind == kind) return kinds[i].class;
	return "sys";
}

static void start_link(const struct picture *p, const struct tp_topo_link *link, FILE *out)
{
	char text[40];
	topo_link_text(p->topo, link, text, sizeof(text));
	fprintf(out, "<g class=\"link %s\" stroke-width=\"%.1f\"><title>", class_of(link->kind), thickness(link->bw));
	put(out, p->topo->nodes[link->from].name);
	fputs(" to ", out);
	put(out, p->topo->nodes[link->to].name);
	fprintf(out, ": %s, %.4g GB/s", text, link->bw);
	if (link->full_bw > link->bw * 1.001) fprintf(out, " (could be %.4g)", link->full_bw);
	fputs("</title>", out);
}

/* From a part up to what it hangs on. */
static void draw_tree_link(const struct picture *p, const struct tp_topo_link *link, FILE *out)
{
	const struct box *a = &p->boxes[link->from], *b = &p->boxes[link->to];
	bool narrow = link->full_bw > link->bw * 1.001;
	double x = a->x + a->w / 2, up = p->topo->nodes[link->to].kind == TP_TOPO_CPU ? x : b->x + b->w / 2, bottom = b->y + b->h;
	/* A GPU's C2C runs beside its PCIe link. */
	if (link->kind == TP_WIRE_C2C) {
		x -= a->w / 2 - 12;
		up = x;
	}
	start_link(p, link, out);
	/* Aside within one row, so that it passes no other's switch. */
	double turn = fmax(a->y - bottom > 60 ? bottom + 50 : a->y, bottom);
	fprintf(out, "<path d=\"M%.1f %.1f V%.1f C%.1f %.1f %.1f %.1f %.1f %.1f\"%s/></g>\n", x, a->y, turn, x, (turn + bottom) / 2, up, (turn + bottom) / 2, up, bottom,
		narrow ? " class=\"narrow\"" : "");
	char text[32];
	snprintf(text, sizeof(text), "%.4g", link->bw);
	/* On the side that the line leaves free. */
	bool left = up > x + 2 || link->kind == TP_WIRE_C2C;
	double beside = 5 + thickness(link->bw) / 2;
	draw_text(out, left ? x - beside : x + beside, a->y - 7, left ? narrow ? "bw left bad" : "bw left" : narrow ? "bw bad" : "bw", text);
}

static void draw_cpu_link(const struct picture *p, const struct tp_topo_link *link, FILE *out)
{
	const struct box *a = &p->boxes[link->from], *b = &p->boxes[link->to];
	const struct tp_topo_node *from = &p->topo->nodes[link->from], *to = &p->topo->nodes[link->to];
	char text[32];
	/* All are joined to all: neighbours stand for it. */
	if (to->ordinal != from->ordinal + 1) return;
	double left = a->x + a->w, right = b->x, y = a->y + a->h / 2;
	start_link(p, link, out);
	if (right > left) fprintf(out, "<path d=\"M%.1f %.1f H%.1f\"/></g>\n", left, y, right);
	else
		fprintf(out, "<path d=\"M%.1f %.1f C%.1f %.1f %.1f %.1f %.1f %.1f\"/></g>\n", a->x + a->w / 2, a->y, a->x + a->w / 2, a->y - 24,
			b->x + b->w / 2, b->y - 24, b->x + b->w / 2, b->y);
	snprintf(text, sizeof(text), "%.4g", link->bw);
	draw_text(out, (left + right) / 2 - 8, a->y - 6, "bw", text);
}

static void draw_mesh_link(const struct picture *p, const struct tp_topo_link *link, FILE *out)
{
	const struct box *a = &p->boxes[link->from], *b = &p->boxes[link->to];
	double x = a->x + a->w / 2, to = b->x + b->w / 2, y = a->y + a->h, far = fmin(fabs(to - x) / p->tiles[p->topo->nodes[link->from].host].w, 1);
	double depth = 26 + 160 * far, aside = (to > x ? 1 : -1) * (a->w / 2 - 12) * (1 - far);
	/* Nested: near ones leave outside, far ones in the middle, and none lies on another. */
	x += aside;
	to -= aside;
	start_link(p, link, out);
	fprintf(out, "<path d=\"M%.1f %.1f C%.1f %.1f %.1f %.1f %.1f %.1f\" opacity=\"0.75\"/></g>\n", x, y, x, y + depth, to, y + depth, to, y);
}

static double switch_y(const struct picture *p, int32_t host)
{
	return p->tiles[host].y + p->below + 40;
}

static void draw_switch_link(const struct picture *p, const struct tp_topo_link *link, FILE *out)
{
	const struct box *a = &p->boxes[link->from];
	char text[32];
	double x = a->x + a->w / 2, y = a->y + a->h, to = switch_y(p, p->topo->nodes[link->from].host);
	start_link(p, link, out);
	fprintf(out, "<path d=\"M%.1f %.1f V%.1f\"/></g>\n", x, y, to);
	snprintf(text, sizeof(text), "%.4g", link->bw);
	draw_text(out, x + 5 + thickness(link->bw) / 2, y + 22, "bw", text);
}

static void draw_links(const struct picture *p, FILE *out)
{
	const struct tp_topo *topo = p->topo;
	for (int32_t l = 0; l < topo->nlinks; l++) {
		const struct tp_topo_link *link = &topo->links[l];
		const struct tp_topo_node *from = &topo->nodes[link->from], *to = &topo->nodes[link->to];
		if (!p->boxes[link->from].drawn) continue;
		if (to->kind == TP_TOPO_NVS) draw_switch_link(p, link, out);
		else if (!p->boxes[link->to].drawn) continue;
		else if (link->kind == TP_WIRE_NVL && to->kind == TP_TOPO_GPU && link->from < link->to) draw_mesh_link(p, link, out);
		else if (link->kind == TP_WIRE_SYS && from->ordinal < to->ordinal) draw_cpu_link(p, link, out);
		else if (from->parent == link->to || (link->kind == TP_WIRE_C2C && from->kind == TP_TOPO_GPU)) draw_tree_link(p, link, out);
	}
}

static const char *port_name(const struct tp_topo_node *port) { return strrchr(port->name, '/') ? strrchr(port->name, '/') + 1 : port->name; }

/* Of several ports the first one's name, how many more there are, and all their rates where they differ. */
static void describe_ports(const struct tp_topo *topo, const struct tp_topo_node *nic, char lines[3][64])
{
	const struct tp_topo_node *first = NULL;
	double sum = 0;
	int count = 0;
	for (int32_t l = nic->first_link; l < nic->first_link + nic->nlinks; l++) {
		const struct tp_topo_node *port = &topo->nodes[topo->links[l].to];
		if (port->kind != TP_TOPO_NET) continue;
		if (!first || port->net.dev < first->net.dev) first = port;
		sum += port->net.bw * 8;
		count++;
	}
	if (!first) return;
	snprintf(lines[2], sizeof(lines[2]), "%s", topo_fabric_name(first->net.fabric));
	if (count == 1) {
		snprintf(lines[0], sizeof(lines[0]), "%.40s", port_name(first));
		snprintf(lines[1], sizeof(lines[1]), "%.4g Gb/s", sum);
	} else {
		snprintf(lines[0], sizeof(lines[0]), "%.30s + %d", port_name(first), count - 1);
		snprintf(lines[1], sizeof(lines[1]), "%d ports, %.4g Gb/s", count, sum);
	}
}

/* What the box says at more length, where the mouse rests. */
static void put_title(const struct tp_topo *topo, const struct tp_topo_node *node, FILE *out)
{
	put(out, node->name);
	if (node->pci.bus_id[0]) fprintf(out, " %s", node->pci.bus_id);
	for (int32_t l = node->first_link; l < node->first_link + node->nlinks && node->kind == TP_TOPO_NIC; l++) {
		const struct tp_topo_node *port = &topo->nodes[topo->links[l].to];
		if (port->kind != TP_TOPO_NET) continue;
		fputs(", ", out);
		put(out, port->name);
		fprintf(out, " %.4g Gb/s", port->net.bw * 8);
	}
}

static void describe(const struct tp_topo *topo, const struct tp_topo_node *node, char lines[3][64])
{
	static const char *const vendors[] = { "", "Intel", "AMD", "Zhaoxin" };
	memset(lines, 0, 3 * sizeof(lines[0]));
	snprintf(lines[0], sizeof(lines[0]), "%.40s", strrchr(node->name, '/') && node->kind != TP_TOPO_PCI ? strrchr(node->name, '/') + 1 : node->name);
	switch (node->kind) {
	case TP_TOPO_GPU:
		if (node->gpu.gcn[0]) snprintf(lines[1], sizeof(lines[1]), "%s", node->gpu.gcn);
		else snprintf(lines[1], sizeof(lines[1]), "sm %d", node->gpu.sm);
		if (node->gpu.rank >= 0) snprintf(lines[2], sizeof(lines[2]), "rank %d", node->gpu.rank);
		break;
	case TP_TOPO_NIC:
		describe_ports(topo, node, lines);
		break;
	case TP_TOPO_CPU:
		snprintf(lines[1], sizeof(lines[1]), "%s", node->cpu.arch == TP_ARCH_ARM ? "Arm" : node->cpu.arch == TP_ARCH_POWER ? "POWER" : vendors[node->cpu.vendor]);
		break;
	default:
		snprintf(lines[0], sizeof(lines[0]), "%s", node->pci.acs == 1 ? "switch, ACS on" : "PCIe switch");
		snprintf(lines[1], sizeof(lines[1]), "%s", node->pci.bus_id);
	}
}

static void draw_boxes(const struct picture *p, const bool *faulty, FILE *out)
{
	static const char *const classes[TP_TOPO_KINDS] = { "gpu", "bridge", "nvs", "cpu", "nic", "port", "cache", "core" };
	for (int32_t i = 0; i < p->topo->nnodes; i++) {
		const struct tp_topo_node *node = &p->topo->nodes[i];
		const struct box *b = &p->boxes[i];
		char lines[3][64];
		if (!b->drawn) continue;
		describe(p->topo, node, lines);
		fprintf(out, "<g class=\"node %s%s\"><title>", classes[node->kind], faulty[i] ? " faulty" : "");
		put_title(p->topo, node, out);
		fprintf(out, "</title><rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" rx=\"7\"/>\n", b->x, b->y, b->w, b->h);
		double middle = b->x + b->w / 2, y = b->y + (b->h > 50 ? 20 : 16);
		for (int l = 0; l < 3; l++)
			if (lines[l][0]) draw_text(out, middle, y + l * 16, l ? "small" : "name", lines[l]);
		fputs("</g>\n", out);
	}
}

static void draw_switches(const struct picture *p, FILE *out)
{
	const struct tp_topo *topo = p->topo;
	for (int32_t h = 0; h < topo->nhosts && topo->count[TP_TOPO_NVS]; h++) {
		double left = INFINITY, right = 0, y = switch_y(p, h);
		int joined = 0;
		for (int32_t l = 0; l < topo->nlinks; l++) {
			const struct tp_topo_link *link = &topo->links[l];
			if (topo->nodes[link->to].kind != TP_TOPO_NVS) continue;
			joined++;
			if (topo->nodes[link->from].host != h) continue;
			left = fmin(left, p->boxes[link->from].x);
			right = fmax(right, p->boxes[link->from].x + p->boxes[link->from].w);
		}
		if (right <= left) continue;
		char text[64];
		snprintf(text, sizeof(text), topo->nhosts > 1 && topo->count[TP_TOPO_NVS] == 1 ? "NVSwitch, shared by %d GPUs of all hosts" : "NVSwitch", joined);
		fprintf(out, "<g class=\"node nvs\"><rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"28\" rx=\"7\"/>\n", left, y, right - left);
		draw_text(out, (left + right) / 2, y + 19, "name", text);
		fputs("</g>\n", out);
	}
}

/* ---- Channels ---- */

static void hue_of(int channel, int count, char out[32])
{
	snprintf(out, 32, "hsl(%d,75%%,42%%)", channel * 360 / (count > 0 ? count : 1));
}

static const struct box *port_box(const struct picture *p, int32_t net)
{
	return net >= 0 && p->topo->nodes[net].parent >= 0 ? &p->boxes[p->topo->nodes[net].parent] : NULL;
}

static void draw_arc(const struct box *a, const struct box *b, double shift, bool dashed, FILE *out)
{
	double x = a->x + a->w / 2 + shift, to = b->x + b->w / 2 + shift, y = a->y + a->h - 4, depth = 34 + fmin(fabs(to - x) * 0.13, 120) + fabs(shift);
	fprintf(out, "<path d=\"M%.1f %.1f C%.1f %.1f %.1f %.1f %.1f %.1f\" marker-end=\"url(#arrow)\"%s/>\n", x, y, x, y + depth, to, y + depth, to, b->y + b->h - 4,
		dashed ? " stroke-dasharray=\"5 4\"" : "");
}

static void draw_channel(const struct picture *p, const struct tp_channels *all, int index, const char *what, FILE *out)
{
	const struct tp_channel *c = &all->channels[index];
	char colour[32];
	double shift = (index - (all->nchannels - 1) / 2.0) * fmin(56.0 / (all->nchannels > 1 ? all->nchannels : 1), 8);
	hue_of(index, all->nchannels, colour);
	fprintf(out, "<g class=\"channel\" id=\"%s%d\" style=\"display:none;stroke:%s;color:%s\"><title>%s %d: %.4g GB/s</title>\n", what,
		index, colour, colour, what, index, all->bw_intra);
	const struct box *in = port_box(p, c->net_in), *from = port_box(p, c->net_out);
	if (in) draw_arc(in, &p->boxes[c->gpus[0]], shift, true, out);
	for (int g = 0; g + 1 < all->ngpus; g++) {
		const struct box *here = &p->boxes[c->gpus[g]], *next = &p->boxes[c->gpus[g + 1]];
		const struct box *leaves = c->nets ? port_box(p, c->nets[g].next) : NULL, *enters = c->nets ? port_box(p, c->nets[g + 1].prev) : NULL;
		if (leaves && enters) {
			draw_arc(here, leaves, shift, false, out);
			draw_arc(leaves, enters, shift, true, out);
			draw_arc(enters, next, shift, false, out);
		} else {
			draw_arc(here, next, shift, false, out);
		}
	}
	if (all->pattern == TP_PATTERN_RING && all->ngpus > 1) {
		if (from) draw_arc(&p->boxes[c->gpus[all->ngpus - 1]], from, shift, true, out);
		else draw_arc(&p->boxes[c->gpus[all->ngpus - 1]], &p->boxes[c->gpus[0]], shift, false, out);
	}
	fputs("</g>\n", out);
}

/* How many of its buttons fit into a row. */
static int buttons_a_row(const struct picture *p) { return (int)((p->width - 440) / 36); }

/* What is clicked on; returns where the next row may begin. out NULL: only measures. */
static double draw_switchboard(const struct picture *p, const struct tp_channels *all, const char *what, double y, FILE *out)
{
	char text[96];
	int row = buttons_a_row(p);
	double below = y + 30 + (all->nchannels - 1) / row * 26;
	if (!out) return below;
	snprintf(text, sizeof(text), "%d %s%s of %.4g GB/s%s: click to show", all->nchannels, what, all->nchannels == 1 ? "" : "s", all->bw_intra,
		all->nfindings ? " (see below)" : "");
	draw_text(out, 40, y, "legend", text);
	for (int c = 0; c < all->nchannels; c++) {
		char colour[32];
		hue_of(c, all->nchannels, colour);
		fprintf(out, "<g class=\"chip\" data-channel=\"%s%d\"><rect x=\"%.1f\" y=\"%.1f\" width=\"30\" height=\"20\" rx=\"5\" fill=\"%s\"/>", what, c, 400 + c % row * 36.0,
			y - 15 + c / row * 26.0, colour);
		fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"chiptext\">%d</text></g>\n", 415 + c % row * 36.0, y - 1 + c / row * 26.0, c);
	}
	return below;
}

static const char style[] =
	"text{font-family:'DejaVu Sans',Helvetica,Arial,sans-serif;fill:#1d2733}"
	".title{font-size:26px;font-weight:bold}.sub{font-size:14px;fill:#5b6773}"
	".name{font-size:13px;font-weight:bold;text-anchor:middle}.small{font-size:11px;text-anchor:middle;fill:#43505c}"
	".bw{font-size:10px;fill:#5b6773}.left{text-anchor:end}.bad{fill:#c0392b;font-weight:bold}.legend{font-size:13px}.warn{font-size:13px;fill:#a93226}"
	".node rect{stroke-width:1.4;stroke:#5b6773;fill:#f4f6f8}.gpu rect{fill:#dff3e3;stroke:#2e9e4f}.nic rect{fill:#fdebd3;stroke:#d9822b}"
	".bridge rect{fill:#e3eefb;stroke:#2f6fb7}.cpu rect{fill:#eceff3;stroke:#6d7681}.nvs rect{fill:#c9ecd2;stroke:#2e9e4f}"
	".faulty rect{stroke:#c0392b;stroke-width:3.2;stroke-dasharray:7 3}"
	".link{fill:none;stroke-linecap:round}.link.nvl{stroke:#2e9e4f}.link.c2c{stroke:#8e44ad}.link.pci{stroke:#2f6fb7}.link.sys{stroke:#8a8f98}"
	".link.net{stroke:#d9822b}.narrow{stroke-dasharray:6 5;stroke:#c0392b}.link:hover{stroke-opacity:.6}"
	".tile{fill:#ffffff;stroke:#d5dbe1}.channel{fill:none;stroke-width:2.6}.chip{cursor:pointer}.chip rect{opacity:.35}.chip.on rect{opacity:1}"
	".chiptext{font-size:11px;text-anchor:middle;font-weight:bold;pointer-events:none}.chip.on .chiptext{fill:#fff}";

static const char script[] =
	"document.querySelectorAll('.chip').forEach(function(chip){chip.addEventListener('click',function(){"
	"var c=document.getElementById(chip.dataset.channel);var on=c.style.display==='none';c.style.display=on?'':'none';"
	"chip.classList.toggle('on',on);});});";

/* out NULL: only measures. */
static double draw_legend(const struct picture *p, double y, FILE *out)
{
	double x = 40;
	for (size_t i = 0; i < TP_ARRAY_LEN(kinds); i++) {
		double most = 0;
		for (int32_t l = 0; l < p->topo->nlinks; l++)
			if (p->topo->links[l].kind == kinds[i].kind && p->topo->links[l].bw < 5000) most = fmax(most, p->topo->links[l].bw);
		if (most == 0 || kinds[i].kind == TP_WIRE_NET) continue;
		char text[64];
		if (x > p->width - 260) {
			x = 40;
			y += 26;
		}
		bool amd = p->topo->count[TP_TOPO_GPU] && tp_topo_node_of(p->topo, TP_TOPO_GPU, 0)->gpu.maker == TP_MAKER_AMD && kinds[i].kind == TP_WIRE_NVL;
		snprintf(text, sizeof(text), "%s, up to %.4g GB/s", amd ? "xGMI" : kinds[i].name, most);
		if (out) {
			fprintf(out, "<path d=\"M%.1f %.1f h34\" stroke=\"%s\" stroke-width=\"%.1f\"/>\n", x, y - 4, kinds[i].colour, thickness(most));
			draw_text(out, x + 44, y, "legend", text);
		}
		x += 70 + 8.2 * (double)strlen(text);
	}
	return y + 30;
}

struct notes { struct tp_topo_warning *faults; int nfaults; struct tp_channels *rings, *trees; };

/* Broken at blanks into lines that fit; out NULL: only measures. Returns where the next one goes. */
static double draw_note(const char *text, double width, double y, FILE *out)
{
	size_t room = (size_t)fmax((width - 80) / 7.6, 30);
	while (*text) {
		char line[512];
		size_t bytes = strlen(text);
		if (bytes > room) {
			bytes = room;
			while (bytes > room / 2 && text[bytes] != ' ') bytes--;
		}
		snprintf(line, sizeof(line), "%.*s", (int)bytes, text);
		if (out) draw_text(out, 40, y, "warn", line);
		text += bytes + strspn(text + bytes, " ");
		y += 20;
	}
	return y + 4;
}

static double draw_notes(const struct notes *notes, double width, double y, FILE *out)
{
	for (int i = 0; i < notes->nfaults; i++) y = draw_note(notes->faults[i].text, width, y, out);
	const struct tp_channels *const both[] = { notes->rings, notes->trees };
	for (int k = 0; k < 2; k++)
		for (int i = 0; both[k] && i < both[k]->nfindings; i++) y = draw_note(both[k]->findings[i].text, width, y, out);
	return y;
}

/* All that stands below the machine; out NULL: only measures. */
static double draw_below(const struct picture *p, const struct notes *notes, double y, FILE *out)
{
	const struct tp_channels *const both[] = { notes->rings, notes->trees };
	static const char *const names[] = { "ring", "tree" };
	y = draw_legend(p, y, out);
	for (int k = 0; k < 2; k++)
		if (both[k] && both[k]->nchannels) y = draw_switchboard(p, both[k], names[k], y, out);
	return draw_notes(notes, p->width, y, out);
}

static void draw_svg(const struct topo_machine *m, const struct picture *p, const struct notes *notes, bool html, FILE *out)
{
	const struct tp_topo *topo = m->topo;
	double height = draw_below(p, notes, p->height + 4, NULL) + 10;
	char text[160];
	bool *faulty = calloc((size_t)topo->nnodes, sizeof(*faulty));
	if (!faulty) return;
	for (int i = 0; i < notes->nfaults; i++) {
		int32_t node = notes->faults[i].node;
		/* A port is drawn as its NIC. */
		if (node >= 0 && topo->nodes[node].kind == TP_TOPO_NET) node = topo->nodes[node].parent;
		if (node >= 0) faulty[node] = true;
	}
	fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\"%s>\n<style>%s</style>\n", p->width, height, html ? "" : " font-size=\"12\"", style);
	fputs("<defs><marker id=\"arrow\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"3.6\" markerHeight=\"3.6\" orient=\"auto\"><path d=\"M0 0 L8 4 L0 8 z\" "
		"fill=\"#33404d\" stroke=\"none\"/></marker></defs>\n", out);
	fprintf(out, "<rect width=\"%.0f\" height=\"%.0f\" fill=\"#fbfcfd\"/>\n", p->width, height);
	draw_text(out, 40, 46, "title", strrchr(m->name, '/') ? strrchr(m->name, '/') + 1 : m->name);
	snprintf(text, sizeof(text), "GPUs: %d, network ports: %d, CPUs: %d, hosts: %d; bandwidths in GB/s one way", topo->count[TP_TOPO_GPU], topo->count[TP_TOPO_NET],
		topo->count[TP_TOPO_CPU], topo->nhosts);
	draw_text(out, 40, 70, "sub", text);
	for (int32_t h = 0; h < topo->nhosts && topo->nhosts > 1; h++) {
		fprintf(out, "<rect class=\"tile\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" rx=\"10\"/>\n", p->tiles[h].x - 14,
			p->tiles[h].y - 4, p->tiles[h].w + 28, p->tiles[h].h);
		snprintf(text, sizeof(text), "host %d", h);
		draw_text(out, p->tiles[h].x, p->tiles[h].y + 16, "sub", text);
	}
	draw_links(p, out);
	draw_switches(p, out);
	draw_boxes(p, faulty, out);
	const struct tp_channels *const both[] = { notes->rings, notes->trees };
	static const char *const names[] = { "ring", "tree" };
	for (int k = 0; k < 2; k++)
		for (int c = 0; both[k] && c < both[k]->nchannels; c++) draw_channel(p, both[k], c, names[k], out);
	draw_below(p, notes, p->height + 4, out);
	if (!html) fprintf(out, "<script>//<![CDATA[\n%s\n//]]></script>\n", script);
	fputs("</svg>\n", out);
	free(faulty);
}

int topo_draw(const struct topo_machine *m, bool html, FILE *out)
{
	struct picture picture;
	struct notes notes = { 0 };
	int ngpus = m->topo->count[TP_TOPO_GPU];
	if (!picture_lay_out(m->topo, &picture)) return 1;
	int status = tp_topo_find_faults(m->topo, &m->policy, &notes.faults, &notes.nfaults) == ncclSuccess ? 0 : 1;
	/* Over several hosts arcs would cover everything. */
	if (!status && ngpus > 1 && m->topo->nhosts == 1 && (tp_channels_search(m->topo, &m->policy, TP_PATTERN_RING, &notes.rings) != ncclSuccess ||
		tp_channels_search(m->topo, &m->policy, TP_PATTERN_TREE, &notes.trees) != ncclSuccess))
		status = 1;
	if (!status) {
		if (html) {
			fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>", out);
			put(out, m->name);
			fputs("</title><style>body{margin:0;background:#fbfcfd}svg{width:100%;height:auto;display:block}</style></head><body>\n", out);
		}
		draw_svg(m, &picture, &notes, html, out);
		if (html) fprintf(out, "<script>%s</script>\n</body></html>\n", script);
	}
	if (notes.rings) tp_channels_free(notes.rings);
	if (notes.trees) tp_channels_free(notes.trees);
	free(notes.faults);
	picture_free(&picture);
	return status;
}

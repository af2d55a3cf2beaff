/* `telpher calc`, links of a machine: PCIe, NVLink, full meshes, memory channels, the words of NVIDIA and AMD for the same things. */
#include "calc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Per lane and direction. Up to 2.0 8 of 10 bits are data, to 5.0 128 of 130; from 6.0 on what a FLIT leaves: 15 of 16 is the
 * articles' rounding (7.5 GB/s of 8); a FLIT's own 236 bytes of 256 would be 7.375. */
static const struct generation { int number; double gts, kept; const char *coding; double nccl_lane; } generations[] = {
	{ 1, 2.5, 0.8, "8b/10b", 15 }, { 2, 5, 0.8, "8b/10b", 30 }, { 3, 8, 128.0 / 130, "128b/130b", 60 },
	{ 4, 16, 128.0 / 130, "128b/130b", 120 }, { 5, 32, 128.0 / 130, "128b/130b", 240 },
	{ 6, 64, 15.0 / 16, "PAM4, FLIT, FEC", 480 }, { 7, 128, 15.0 / 16, "PAM4, FLIT, FEC", 0 },
};
enum { GENERATIONS = sizeof(generations) / sizeof(generations[0]) };

static const struct generation *find_generation(const char *text)
{
	double value;
	char number[16];
	if (!strncasecmp(text, "gen", 3)) text += 3;
	size_t digits = strspn(text, "0123456789.");
	if (!digits || digits >= sizeof(number)) return NULL;
	memcpy(number, text, digits);
	number[digits] = 0;
	const char *unit = text + digits + strspn(text + digits, " ");
	bool rate = !strcasecmp(unit, "GT/s") || !strcasecmp(unit, "GT") || !strcasecmp(unit, "GT/s PCIe");
	if ((*unit && !rate) || !calc_number(number, 1, 128, &value)) return NULL;
	for (size_t i = 0; i < GENERATIONS; i++)
		if (rate ? value == generations[i].gts : value == generations[i].number) return &generations[i];
	return NULL;
}

static void fill_pcie(const struct generation *g, int lanes, struct calc_pcie *out)
{
	double lane = g->gts * g->kept / 8;
	*out = (struct calc_pcie){ g->number, lanes, g->gts, lane, lane * lanes, g->nccl_lane * lanes / 80 };
}

int calc_read_pcie(const struct calc *c, const char *generation, const char *lanes, struct calc_pcie *out)
{
	const struct generation *g = find_generation(generation);
	int n = 16;
	if (!g) return calc_refuse(c, "\"%s\" is no PCIe generation; say 1 to 7, or a rate as 32GT/s", generation);
	if (lanes && !calc_integer(lanes + (*lanes == 'x'), 1, 32, &n)) n = 0;
	if (n != 1 && n != 2 && n != 4 && n != 8 && n != 12 && n != 16 && n != 32)
		return calc_refuse(c, "\"%s\" is no number of lanes; a link has 1, 2, 4, 8, 12, 16 or 32", lanes);
	fill_pcie(g, n, out);
	return 0;
}

static void pcie_table(struct calc *c)
{
	cJSON *table = calc_table(c, "PCIe, one way, before packet headers", CALC_OVERVIEW "; the last column: " CALC_NCCL,
		"generation|rate a lane|coding|GB/s a lane|GB/s x16|raw GB/s x16|NCCL's GB/s x16");
	for (size_t i = 0; i < GENERATIONS; i++) {
		struct calc_pcie p;
		char nccl[16] = "-";
		fill_pcie(&generations[i], 16, &p);
		if (generations[i].nccl_lane > 0) snprintf(nccl, sizeof(nccl), "%.0f", p.nccl_gbs);
		calc_row(c, table, "%d.0|%g GT/s|%s|%.3f|%.1f|%.0f|%s", p.generation, p.gts, generations[i].coding, p.lane_gbs, p.link_gbs,
			p.gts * 2, nccl);
	}
	calc_note(c, "Both ways together twice as much. 128 and 256 GB/s of 6.0 and 7.0 are the raw rate, before FEC and CRC.");
}

static int pcie(struct calc *c)
{
	struct calc_pcie p;
	const struct calc_options *o = c->options;
	if (!c->nwords) return pcie_table(c), 0;
	int status = calc_read_pcie(c, c->words[0], c->nwords > 1 ? c->words[1] : NULL, &p);
	if (status) return status;
	const struct generation *g = &generations[p.generation - 1];
	/* A packet's own framing: sequence number and start 4 bytes, LCRC 4. A FLIT has both once for all its packets. */
	int framing = p.generation < 6 ? 8 : 0, write_tax = o->header + framing, read_tax = 12 + framing;
	double write = p.link_gbs * o->mps / (o->mps + write_tax), read = p.link_gbs * o->mps / (o->mps + read_tax);
	calc_value(c, "link, one way", p.link_gbs, "GB/s", CALC_OVERVIEW, "%g GT/s x %.4f (%s) / 8 x %d lanes", p.gts, g->kept, g->coding,
		p.lanes);
	calc_value(c, "link, both ways together", 2 * p.link_gbs, "GB/s", NULL, "2 x %.4g", p.link_gbs);
	calc_value(c, "payload of a write", 100.0 * o->mps / (o->mps + write_tax), "%", CALC_PCIE ": transaction and data link layer",
		"MPS / (MPS + header + framing) = %d / (%d + %d + %d)", o->mps, o->mps, o->header, framing);
	calc_value(c, "writes", write, "GB/s", NULL, "%.4g x %d / %d", p.link_gbs, o->mps, o->mps + write_tax);
	calc_value(c, "reads, by completions", read, "GB/s", CALC_PCIE ": completions of MPS bytes, header 12", "%.4g x %d / (%d + 12 + %d)",
		p.link_gbs, o->mps, o->mps, framing);
	double needed = read * o->rtt_ns / o->mrrs;
	calc_value(c, "reads in flight that fill the link", (double)(long)(needed + 0.999999), "",
		"non-posted: a read's bytes are in flight for a round trip", "%.4g GB/s x %d ns / MRRS %d", read, o->rtt_ns, o->mrrs);
	if (o->outstanding) {
		double bound = (double)o->outstanding * o->mrrs / o->rtt_ns;
		calc_value(c, "reads, with these in flight", bound < read ? bound : read, "GB/s", NULL, "min(%.4g, %d x %d / %d ns)", read,
			o->outstanding, o->mrrs, o->rtt_ns);
	}
	calc_value(c, "requests' share of the other direction", read * write_tax / o->mrrs, "GB/s", NULL,
		"a request of %d bytes for every %d read", write_tax, o->mrrs);
	if (g->nccl_lane > 0)
		calc_value(c, "as NCCL counts it", p.nccl_gbs, "GB/s", CALC_NCCL, "%d lanes x %g (100 Mb/s) / 80", p.lanes, g->nccl_lane);
	calc_note(c, "Flow control and acknowledgements take some more. Writes are posted, reads wait for their completions.");
	return 0;
}

static const struct nvlink {
	double number;
	const char *names;
	double link_both;               /* GB/s of a link, both ways */
	int links;
	const char *lane;
	double nccl_link;               /* one way, as NCCL counts */
	const char *nccl_sm;
} nvlinks[] = {
	{ 1, "Pascal P100 sm60", 40, 4, "NRZ 20 Gb/s", 18, "sm60" },
	{ 2, "Volta V100 sm70", 50, 6, "NRZ 25 Gb/s", 20, "sm70" },
	{ 3, "Ampere A100 sm80", 50, 12, "NRZ 50 Gb/s", 20, "sm80" },
	{ 4, "Hopper H100 H200 sm90", 50, 18, "PAM4 106 Gb/s", 20.6, "sm90" },
	{ 5, "Blackwell B200 GB200 B300 GB300 sm100", 100, 18, "PAM4 212 Gb/s", 40.1, "sm100" },
};
enum { NVLINKS = sizeof(nvlinks) / sizeof(nvlinks[0]) };

static bool is_a_name_of(const char *names, const char *word)
{
	for (size_t length = strlen(word); *names; names += strcspn(names, " "), names += *names == ' ')
		if (strcspn(names, " ") == length && !strncasecmp(names, word, length)) return true;
	return false;
}

static const struct nvlink *find_nvlink(const char *word)
{
	double number;
	for (size_t i = 0; i < NVLINKS; i++)
		if (is_a_name_of(nvlinks[i].names, word) || (calc_number(word, 1, 5, &number) && number == nvlinks[i].number)) return &nvlinks[i];
	return NULL;
}

static void nvlink_tables(struct calc *c)
{
	cJSON *table = calc_table(c, "NVLink of a GPU", CALC_OVERVIEW "; the last column: " CALC_NCCL,
		"NVLink|first in|a link, both ways|links|one way|both ways|a lane|NCCL's one way");
	for (size_t i = 0; i < NVLINKS; i++) {
		const struct nvlink *n = &nvlinks[i];
		calc_row(c, table, "%.1f|%.*s|%g GB/s|%d|%g GB/s|%g GB/s|%s|%g x %d = %g GB/s", n->number, (int)strcspn(n->names, " "), n->names,
			n->link_both, n->links, n->link_both * n->links / 2, n->link_both * n->links, n->lane, n->nccl_link, n->links,
			n->nccl_link * n->links);
	}
	table = calc_table(c, "NVSwitch", CALC_OVERVIEW, "NVSwitch|with|what it brought");
	calc_row(c, table, "1.0|Volta V100 (DGX-2)|16 GPUs, each to each");
	calc_row(c, table, "2.0|Ampere A100|8 GPUs at NVLink 3.0");
	calc_row(c, table, "3.0|Hopper H100|NVLink 4.0, reduction in the switch (SHARP, NVLS), switches outside the box");
	calc_row(c, table, "4.0|Blackwell GB200|72 GPUs of a rack, one NVLink domain");
}

static int nvlink(struct calc *c)
{
	int links;
	if (!c->nwords) return nvlink_tables(c), 0;
	const struct nvlink *n = find_nvlink(c->words[0]);
	if (!n) return calc_refuse(c, "\"%s\" is no NVLink; say 1 to 5, an architecture or a GPU as H100", c->words[0]);
	links = n->links;
	if (c->nwords > 1 && !calc_integer(c->words[1], 1, 18, &links))
		return calc_refuse(c, "\"%s\" is no number of links; a GPU has 1 to 18", c->words[1]);
	double way = n->link_both / 2 * links;
	calc_value(c, "one way", way, "GB/s", CALC_OVERVIEW, "%d links x %g GB/s", links, n->link_both / 2);
	calc_value(c, "both ways together", 2 * way, "GB/s", CALC_OVERVIEW, "%d links x %g GB/s", links, n->link_both);
	calc_value(c, "as NCCL counts it, one way", n->nccl_link * links, "GB/s", CALC_NCCL, "%d links x %g (%s)", links, n->nccl_link,
		n->nccl_sm);
	if (n->number == 4)
		calc_value(c, "a link's raw rate, one way", 2 * 106.25 / 8, "GB/s", CALC_OVERVIEW, "2 pairs x 106.25 Gb/s / 8; 25 after coding");
	calc_note(c, "Through NVSwitch any one pair may have all of it; each GPU's links are shared by all that it talks to.");
	return 0;
}

static int mesh(struct calc *c)
{
	int n, links = 0;
	if (!calc_integer(c->words[0], 2, 100000, &n)) return calc_refuse(c, "\"%s\" is no number of GPUs; from 2 on", c->words[0]);
	if (c->nwords > 1 && !calc_integer(c->words[1], 1, 1000, &links))
		return calc_refuse(c, "\"%s\" is no number of links of a GPU", c->words[1]);
	calc_value(c, "pairs", 0.5 * n * (n - 1), "", CALC_OVERVIEW, "n (n - 1) / 2 = %d x %d / 2", n, n - 1);
	if (links) {
		calc_value(c, "links to each peer", links / (n - 1), "", NULL, "%d links / %d peers, whole ones", links, n - 1);
		calc_value(c, "links left over", links % (n - 1), "", NULL, "%d modulo %d", links, n - 1);
	}
	return 0;
}

static int memory(struct calc *c)
{
	int channels, mts;
	if (!calc_integer(c->words[0], 1, 64, &channels)) return calc_refuse(c, "\"%s\" is no number of channels; from 1 to 64", c->words[0]);
	if (!calc_integer(c->words[1], 200, 100000, &mts))
		return calc_refuse(c, "\"%s\" is no rate in MT/s, as 4800 of DDR5-4800", c->words[1]);
	calc_value(c, "a socket's memory", channels * 8.0 * mts / 1000, "GB/s", CALC_PATHS, "%d channels x %d MT/s x 8 bytes", channels, mts);
	return 0;
}

static int terms(struct calc *c)
{
	cJSON *table = calc_table(c, "The same thing at NVIDIA and AMD", CALC_OVERVIEW, "what|NVIDIA|AMD");
	calc_row(c, table, "GPU to GPU, direct|NVLink|xGMI (Infinity Fabric between packages)");
	calc_row(c, table, "each to each in a node|NVSwitch|full mesh of xGMI, no switch");
	calc_row(c, table, "CPU to GPU, coherent|NVLink-C2C (Grace Hopper)|Infinity Fabric (MI300A, one memory)");
	calc_row(c, table, "dies of a package|NV-HBI|IFOP");
	calc_row(c, table, "between sockets|-|IFIS, on the lanes of PCIe");
	calc_row(c, table, "compute die|-|GCD (MI200, MI250X: two a card), XCD (MI300: eight)");
	calc_row(c, table, "collectives|NCCL|RCCL");
	return 0;
}

const struct calc_command calc_links[] = {
	{ "pcie", "[GEN [LANES]]", "GB/s of a PCIe link, for writes and for reads (--mps, --mrrs, --header, …)", 0, 2, pcie },
	{ "nvlink", "[GEN|GPU [LINKS]]", "GB/s of a GPU's NVLinks", 0, 2, nvlink },
	{ "mesh", "GPUS [LINKS]", "pairs of a full mesh, and what a GPU's links leave for each", 1, 2, mesh },
	{ "memory", "CHANNELS MT/S", "GB/s of a socket's memory", 2, 2, memory },
	{ "terms", "", "the words of NVIDIA and AMD for the same things", 0, 0, terms },
};
const size_t calc_links_count = sizeof(calc_links) / sizeof(calc_links[0]);

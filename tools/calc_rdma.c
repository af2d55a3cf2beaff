/* `telpher calc`, the network's side: NIC rates, the three paths from GPU memory to GPU memory, timeouts of queue pairs, traffic
 * classes, levels of P2P and GPUDirect RDMA, cores for TCP, memory registration. */
#include "calc.h"
#include "probe/formula.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "tools.h"

static double least(double a, double b) { return a < b ? a : b; }

static void nic_table(struct calc *c)
{
	static const char *const names[] = { "FDR", "EDR", "HDR", "NDR", "XDR" };
	cJSON *table = calc_table(c, "InfiniBand, four lanes, one way", CALC_OVERVIEW, "name|Gb/s|GB/s");
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		double gbit = 0;
		calc_rate(names[i], &gbit);
		calc_row(c, table, "%s|%g|%g", names[i], gbit, gbit / 8);
	}
}

static int nic(struct calc *c)
{
	double gbit;
	if (!c->nwords) return nic_table(c), 0;
	if (!calc_rate(c->words[0], &gbit))
		return calc_refuse(c, "\"%s\" is no rate in bits; say 400, 400G, 100000M or NDR", c->words[0]);
	calc_value(c, "one way", gbit / 8, "GB/s", CALC_PATHS, "%g Gb/s / 8", gbit);
	calc_value(c, "as NCCL counts it", gbit / 8, "GB/s", CALC_NCCL, "%g Mb/s / 8000", gbit * 1000);
	calc_range(c, "usual of ib_write_bw, 1 MB messages", 0.925 * gbit / 8, 0.975 * gbit / 8, "GB/s", CALC_PATHS,
		"92.5 to 97.5 %% of the line, as 370 to 390 of 400 Gb/s");
	if (c->options->pcie) {
		struct calc_pcie p;
		int status = calc_read_pcie(c, c->options->pcie, c->options->lanes, &p);
		if (status) return status;
		calc_value(c, "behind this slot", least(gbit / 8, p.link_gbs), "GB/s", CALC_PATHS, "min(NIC %.4g, PCIe %d.0 x%d %.4g)",
			gbit / 8, p.generation, p.lanes, p.link_gbs);
		if (p.link_gbs < gbit / 8)
			calc_note(c, "The slot, not the card, is the limit: %.0f %% of the card lie idle.", 100 * (1 - p.link_gbs * 8 / gbit));
	}
	return 0;
}

/* The three paths. */
static int path(struct calc *c)
{
	const struct calc_options *o = c->options;
	struct calc_pcie p;
	double gbit = 400;
	if (c->nwords && !calc_rate(c->words[0], &gbit))
		return calc_refuse(c, "\"%s\" is no rate in bits; say 400, 400G, 100000M or NDR", c->words[0]);
	int status = calc_read_pcie(c, o->pcie ? o->pcie : "5", o->lanes, &p);
	if (status) return status;
	const char *limit;
	const struct probe_path_facts *f = probe_path_facts;
	double wire = gbit / 8;
	struct probe_stages stages = { .nic = wire, .gpu_host = p.link_gbs, .nic_host = p.link_gbs, .gpu_nic = p.link_gbs };
	double gdr = probe_path_bound(PROBE_DIRECT, &stages, &limit), tcp[2];
	for (int i = 0; i < 2; i++) {
		stages.core_tcp = i ? 30.0 / 8 : 10.0 / 8;
		tcp[i] = probe_path_bound(PROBE_TCP, &stages, &limit);
	}
	stages.memory = o->memory_gbs;
	double staged = probe_path_bound(PROBE_STAGED, &stages, &limit);
	double memory = o->memory_gbs * o->sockets, all_staged = least(o->nics * staged, memory / 2);
	calc_value(c, "A: TCP, host memory traffic", o->nics * 4 * wire, "GB/s", CALC_PATHS, "%d NICs x 4 accesses a byte x %.4g; there is %g",
		o->nics, wire, memory);
	calc_range(c, "A: TCP, one stream (one core)", tcp[0], tcp[1], "GB/s", CALC_PATHS,
		"a core drives 10 to 30 Gb/s of TCP");
	calc_value(c, "B: RDMA, staged, host memory traffic", o->nics * 2 * gdr, "GB/s", CALC_PATHS,
		"%d NICs x 2 accesses a byte x %.4g; there is %g", o->nics, gdr, memory);
	calc_value(c, "B: RDMA, staged, one stream", staged, "GB/s", CALC_PATHS, "min(NIC %.4g, PCIe %.4g, memory %g / 2)", wire, p.link_gbs,
		o->memory_gbs);
	calc_value(c, "B: RDMA, staged, all", all_staged, "GB/s", CALC_PATHS, "min(%d x %.4g, memory %g / 2)", o->nics, staged, memory);
	calc_value(c, "C: GPUDirect RDMA, one stream", gdr, "GB/s", CALC_PATHS, "min(NIC %.4g, PCIe %d.0 x%d %.4g)", wire, p.generation, p.lanes,
		p.link_gbs);
	calc_value(c, "C: GPUDirect RDMA, all", o->nics * gdr, "GB/s", CALC_PATHS, "%d x %.4g, host memory none", o->nics, gdr);
	cJSON *table = calc_table(c, "From GPU memory to GPU memory of another machine; bounds, one way, not measured", CALC_PATHS,
		"|A: TCP|B: RDMA, staged|C: GPUDirect RDMA");
	calc_row(c, table, "copies at each end|%d (PCIe, memcpy)|%d (PCIe to pinned memory)|%d", f[PROBE_TCP].copies, f[PROBE_STAGED].copies, f[PROBE_DIRECT].copies);
	calc_row(c, table, "host-memory accesses a byte|%d|%d|%d", f[PROBE_TCP].memory_accesses, f[PROBE_STAGED].memory_accesses, f[PROBE_DIRECT].memory_accesses);
	calc_row(c, table, "PCIe at each end|GPU and NIC, up to the root|GPU and NIC, up to the root|both, turned round in the switch");
	calc_row(c, table, "CPU|every segment|every message|every message");
	calc_row(c, table, "one-way latency|15 to 50 us (round trip)|2 to 5 us and a PCIe copy|1 to 2 us InfiniBand, 2 to 4 us RoCE");
	calc_note(c, "C needs the GPU and the NIC under one PCIe switch: through a root complex it may be a few GB/s, or refused.");
	return 0;
}

/* Queue pairs. */

static double timeout_s(int exponent) { return 4.096e-6 * exp2(exponent); }

static int qp_timeout(struct calc *c)
{
	int exponent, retries = 7;
	if (!c->nwords) {
		cJSON *table = calc_table(c, "Local ACK timeout of a queue pair", CALC_IBTA, "timeout|a try|until status 12, retry_cnt 7");
		calc_row(c, table, "0|for ever|never");
		for (int i = 1; i < 32; i++) calc_row(c, table, "%d|%.4g s|%.4g s", i, timeout_s(i), 8 * timeout_s(i));
		return 0;
	}
	if (!calc_integer(c->words[0], 0, 31, &exponent)) return calc_refuse(c, "\"%s\" is no timeout; from 0 (for ever) to 31", c->words[0]);
	if (c->nwords > 1 && !calc_integer(c->words[1], 0, 7, &retries)) return calc_refuse(c, "\"%s\" is no retry_cnt; from 0 to 7", c->words[1]);
	if (!exponent) {
		calc_text(c, "a try", "for ever: timeout 0 switches the timer off", CALC_IBTA);
	} else {
		calc_value(c, "a try", timeout_s(exponent), "s", CALC_IBTA, "4.096 us x 2^%d", exponent);
		calc_value(c, "until status 12 (retries exceeded)", (retries + 1) * timeout_s(exponent), "s", CALC_IBTA,
			"(retry_cnt %d + 1) tries x %.4g s", retries, timeout_s(exponent));
		calc_note(c, "A card may take up to four times as long for a try. NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT set both; NCCL's are 20 and 7.");
	}
	calc_note(c, "rnr_retry 7, which NCCL sets, is for ever: status 13 can't come up, a receiver that never posts shows as a stall.");
	return 0;
}

static void dscp_name(int dscp, char *name, size_t size)
{
	int high = dscp >> 3, low = dscp & 7;
	if (dscp == 46) snprintf(name, size, "EF");
	else if (!low) snprintf(name, size, "CS%d", high);
	else if (high >= 1 && high <= 4 && (low == 2 || low == 4 || low == 6)) snprintf(name, size, "AF%d%d", high, low / 2);
	else snprintf(name, size, "no name");
}

static void traffic_class(struct calc *c, int dscp, int ecn)
{
	char name[16];
	dscp_name(dscp, name, sizeof(name));
	calc_value(c, "DSCP", dscp, "", "RFC 2474", "the upper six bits: %d >> 2", dscp * 4 + ecn);
	calc_text(c, "its name", name, "RFC 2474, 2597 and 3246");
	calc_value(c, "ECN bits", ecn, "", "RFC 3168", "the lower two");
	calc_value(c, "traffic class", dscp * 4 + ecn, "", CALC_PATHS, "DSCP x 4 + ECN bits; NCCL_IB_TC=%d", dscp * 4 + ecn);
	if (ecn) calc_note(c, "The lower two bits are the network's for congestion marks: a multiple of 4 is what one sets.");
}

static int tc(struct calc *c)
{
	int value;
	if (!calc_integer(c->words[0], 0, 255, &value)) return calc_refuse(c, "\"%s\" is no traffic class; from 0 to 255", c->words[0]);
	return traffic_class(c, value >> 2, value & 3), 0;
}

static int dscp(struct calc *c)
{
	int value;
	char name[16];
	for (int i = 0; i < 64; i++) {
		dscp_name(i, name, sizeof(name));
		if (calc_same(c->words[0], name)) return traffic_class(c, i, 0), 0;
	}
	if (!calc_integer(c->words[0], 0, 63, &value))
		return calc_refuse(c, "\"%s\" is no DSCP; from 0 to 63, or a name as CS3, AF31 or EF", c->words[0]);
	return traffic_class(c, value, 0), 0;
}

/* Levels. old: the number that NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL took; distance: what NCCL 2.28 to 2.30 print; article: the scale
 * of the logs that the article shows. -1: not on that scale. */
static const struct level { const char *name; int old, distance, article; const char *meaning; } levels[] = {
	{ "LOC", 0, 0, 0, "the same device (as a level: never)" },
	{ "NVL", -1, 1, 1, "NVLink, or a switch of it" },
	{ "NVB", -1, 2, -1, "NVLink through another GPU" },
	{ "C2C", -1, 3, -1, "CPU to GPU over C2C" },
	{ "PIX", 1, 4, 2, "one PCIe switch" },
	{ "PXB", 2, 5, 3, "several PCIe switches, not the CPU" },
	{ "P2C", -1, 6, -1, "PCIe to the CPU, then C2C to the GPU" },
	{ "PXN", -1, 7, -1, "NVLink to another GPU, then PCIe to its NIC" },
	{ "PHB", 3, 8, 4, "through the CPU's root complex" },
	{ "SYS", 4, 9, 5, "through the link between sockets" },
	{ "NET", -1, 10, -1, "the network" },
	{ "DIS", -1, 11, -1, "not connected" },
};
enum { LEVELS = sizeof(levels) / sizeof(levels[0]) };

static void scale_text(int value, char *text, size_t size)
{
	if (value < 0) snprintf(text, size, "-");
	else snprintf(text, size, "%d", value);
}

static void level_table(struct calc *c)
{
	cJSON *table = calc_table(c, "Levels of NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL, and distances in logs", CALC_NCCL "; " CALC_PATHS,
		"name|as a level|distance, 2.28 to 2.30|in older logs|meaning");
	for (size_t i = 0; i < LEVELS; i++) {
		char old[16], distance[16], article[16];
		scale_text(levels[i].old, old, sizeof(old));
		scale_text(levels[i].distance, distance, sizeof(distance));
		scale_text(levels[i].article, article, sizeof(article));
		calc_row(c, table, "%s|%s|%s|%s|%s", levels[i].name, old, distance, article, levels[i].meaning);
	}
	calc_note(c, "As a level 5 and more are SYS too. The two scales differ: level 2 is PXB, distance 2 is not.");
	calc_note(c, "By default P2P goes as far as PXB (SYS for two GPUs at most on AMD), GPUDirect RDMA as far as PXB (P2C with C2C).");
	calc_note(c, "SYS for GPUDirect RDMA only where ib_write_bw --use_cuda has shown that the path works.");
}

static int level(struct calc *c)
{
	int number = -1;
	const struct level *found = NULL;
	if (!c->nwords) return level_table(c), 0;
	bool is_number = calc_integer(c->words[0], 0, 1000000, &number);
	for (size_t i = 0; i < LEVELS && !found; i++)
		if (is_number ? levels[i].old == (number > 4 ? 4 : number) : calc_same(levels[i].name, c->words[0])) found = &levels[i];
	if (!found) return calc_refuse(c, "\"%s\" is no level; there are LOC, NVL, PIX, PXB, P2C, PXN, PHB and SYS, or 0 to 5", c->words[0]);
	calc_text(c, "name", found->name, CALC_NCCL);
	calc_text(c, "meaning", found->meaning, NULL);
	if (found->old >= 0) calc_value(c, "as a level", found->old, "", CALC_PATHS, "the old form of NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL");
	calc_value(c, "distance in logs of 2.28 to 2.30", found->distance, "", CALC_NCCL, "another scale than the level's");
	if (found->article >= 0) calc_value(c, "distance in older logs", found->article, "", CALC_PATHS, "as in \"distance 2 <= 3\"");
	if (number >= 4) calc_note(c, "4, 5 and more are all SYS. For GPUDirect RDMA only where ib_write_bw --use_cuda has shown that the path works.");
	return 0;
}

static int cores(struct calc *c)
{
	double gbit;
	if (!calc_rate(c->words[0], &gbit)) return calc_refuse(c, "\"%s\" is no rate in bits; say 400, 400G or NDR", c->words[0]);
	calc_range(c, "cores that only copy", ceil(gbit / 8 / 15), ceil(gbit / 8 / 10), "", CALC_PATHS, "%.4g GB/s / 10 to 15 GB/s a core", gbit / 8);
	calc_range(c, "cores that drive TCP", ceil(gbit / 30), ceil(gbit / 10), "", CALC_PATHS, "%g Gb/s / 10 to 30 Gb/s a core (the article: 15 to 40 for 400)",
		gbit);
	calc_value(c, "host memory traffic at an end", 4 * gbit / 8, "GB/s", CALC_PATHS, "4 accesses a byte x %.4g", gbit / 8);
	calc_value(c, "cores that drive RDMA", 1, "", CALC_PATHS, "post and poll a message, not a packet");
	return 0;
}

static int registration(struct calc *c)
{
	size_t bytes, page;
	if (!tool_parse_size(c->words[0], &bytes) || !bytes)
		return calc_refuse(c, "\"%s\" is no size; say 4096, 64K, 4M or 1G", c->words[0]);
	if (c->options->page && (!tool_parse_size(c->options->page, &page) || page < 512 || page & (page - 1)))
		return calc_refuse(c, "--page %s: a page is a power of two, as 4K, 64K or 2M", c->options->page);
	const size_t both[] = { 4096, 2 << 20 };
	for (size_t i = 0; i < (c->options->page ? 1 : 2); i++) {
		size_t size = c->options->page ? page : both[i];
		double pages = ceil((double)bytes / (double)size);
		char name[64];
		snprintf(name, sizeof(name), "pages of %zu KiB", size >> 10);
		calc_value(c, name, pages, "", CALC_PATHS, "%zu / %zu", bytes, size);
		calc_range(c, "to register them", pages * 1e-3, pages * 3e-3, "ms", CALC_PATHS, "pin and write the translation: 1 to 3 us a page");
	}
	calc_note(c, "So memory is registered once, at the start, and never where a message waits for it.");
	return 0;
}

static int rdma(struct calc *c)
{
	cJSON *table = calc_table(c, "Three ways of RDMA", CALC_OVERVIEW, "|InfiniBand, RC|RoCE v2, RC|EFA, SRD");
	calc_row(c, table, "on the wire|its own link layer, addressed by LID|UDP port 4791 over IP, addressed by GID|AWS's own over Ethernet");
	calc_row(c, table, "loss|none: credits a link|none if PFC, ECN and DCQCN are set up|is expected");
	calc_row(c, table, "order|kept|kept|not kept, put right above");
	calc_row(c, table, "a connection's paths|one (adaptive routing: several)|one, by the hash of its UDP source port|many, packet by packet");
	calc_row(c, table, "sent again|from the lost packet on|from the lost packet on|what was lost");
	calc_row(c, table, "slowed down by|IB CC|DCQCN|the card, by round trips");
	calc_row(c, table, "run by|a subnet manager|IP routing|AWS");
	table = calc_table(c, "Types of queue pairs", CALC_PATHS, "type|reliable|connected|operations");
	calc_row(c, table, "RC|yes, in order|to one peer|SEND, RDMA WRITE, RDMA READ, atomics (NCCL's)");
	calc_row(c, table, "UC|no, in order|to one peer|SEND, RDMA WRITE");
	calc_row(c, table, "UD|no|no|SEND of one MTU at most");
	table = calc_table(c, "What keeps RoCE from losing packets", CALC_OVERVIEW, "what|where|does");
	calc_row(c, table, "PFC (802.1Qbb)|hop by hop|pauses one priority before a buffer runs over");
	calc_row(c, table, "ECN|end to end|marks packets of a growing queue; the receiver answers with CNPs");
	calc_row(c, table, "DCQCN|the sender's card|slows down on CNPs, recovers without; is to act before PFC must");
	table = calc_table(c, "PCIe packets", CALC_OVERVIEW, "request|answered|so");
	calc_row(c, table, "memory write|no (posted)|is sent and done with: fills the link");
	calc_row(c, table, "memory read|by completions (non-posted)|waits a round trip: needs many in flight");
	calc_row(c, table, "configuration|by a completion|");
	calc_row(c, table, "message|no (posted)|interrupts (MSI), errors, power");
	table = calc_table(c, "GPUDirect", CALC_PATHS, "kind|who reaches GPU memory|by");
	calc_row(c, table, "P2P|another GPU|NVLink, or PCIe into its BAR1");
	calc_row(c, table, "RDMA|a NIC|PCIe into BAR1: nvidia-peermem or DMA-BUF");
	calc_row(c, table, "Storage|NVMe or a storage NIC|PCIe (cuFile)");
	calc_row(c, table, "Async|the GPU rings the NIC|the NIC's doorbell mapped into the GPU");
	calc_row(c, table, "(GDRCopy)|the CPU|BAR1 mapped into the process: less than 1 us");
	return 0;
}

const struct calc_command calc_rdma[] = {
	{ "nic", "[RATE]", "GB/s of a NIC, alone and behind a PCIe slot (--pcie, --lanes)", 0, 1, nic },
	{ "path", "[RATE]", "TCP, RDMA staged, GPUDirect RDMA: copies, memory traffic, bounds", 0, 1, path },
	{ "rdma", "", "InfiniBand, RoCE and EFA; queue pairs; loss; PCIe packets; GPUDirect: tables", 0, 0, rdma },
	{ "qp-timeout", "[TIMEOUT [RETRY_CNT]]", "seconds until a queue pair gives up with status 12", 0, 2, qp_timeout },
	{ "tc", "TC", "the DSCP of a traffic class (NCCL_IB_TC)", 1, 1, tc },
	{ "dscp", "DSCP", "the traffic class of a DSCP", 1, 1, dscp },
	{ "level", "[NAME|NUMBER]", "names and numbers of NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL", 0, 1, level },
	{ "cores", "RATE", "cores that TCP takes at a rate", 1, 1, cores },
	{ "register", "SIZE", "pages and time of a memory registration (--page)", 1, 1, registration },
};
const size_t calc_rdma_count = sizeof(calc_rdma) / sizeof(calc_rdma[0]);

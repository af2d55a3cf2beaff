/* `telpher calc`: what its commands share. A command reads its words and the options, and adds what it found to an answer:
 * values (a number or a range, its unit, the formula with the numbers in it, where the formula comes from), tables and notes.
 * calc.c prints an answer, as text or as JSON. */
#ifndef TELPHER_CALC_H
#define TELPHER_CALC_H

#include <stdbool.h>
#include <stddef.h>

#include <cjson/cJSON.h>

struct calc_options {
	int mps, mrrs, header, outstanding, rtt_ns;      /* PCIe, as a device has them; outstanding 0: as many as it takes */
	char *pcie, *lanes;                              /* of nic and path */
	int nics, sockets;
	double memory_gbs;                               /* of one socket */
	char *bytes, *time_us, *algbw_gbs, *page;
};

struct calc {
	const char *command;
	const struct calc_options *options;
	int nwords;
	const char **words;
	cJSON *answer, *values, *tables, *notes;
	bool out_of_memory;
};

struct calc_command {
	const char *name, *words, *doc;
	int min_words, max_words;
	int (*run)(struct calc *c);      /* 0, or what calc_refuse returned */
};

extern const struct calc_command calc_links[], calc_rdma[], calc_collectives[];
extern const size_t calc_links_count, calc_rdma_count, calc_collectives_count;

/* Where formulas come from. */
#define CALC_PCIE "PCI Express base specification"
#define CALC_NCCL "NCCL 2.30.7, the topology's constants"
#define CALC_OVERVIEW "\"GPU communication, the whole picture\" (PCIe, NVLink, RDMA, EFA, NCCL)"
#define CALC_PATHS "\"Communication and interconnects\", part 3 (RDMA and GPUDirect)"
#define CALC_IBTA "InfiniBand architecture specification, volume 1"
#define CALC_TESTS "nccl-tests, PERFORMANCE.md"

/* One error line and its exit status. */
int calc_refuse(const struct calc *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

void calc_value(struct calc *c, const char *name, double value, const char *unit, const char *source, const char *format, ...)
	__attribute__((format(printf, 6, 7)));
void calc_range(struct calc *c, const char *name, double least, double most, const char *unit, const char *source,
	const char *format, ...) __attribute__((format(printf, 7, 8)));
void calc_text(struct calc *c, const char *name, const char *text, const char *source);
void calc_note(struct calc *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A table's columns and rows are written with '|' between cells. */
cJSON *calc_table(struct calc *c, const char *title, const char *source, const char *columns);
void calc_row(struct calc *c, cJSON *table, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* A number in [least, most] and nothing after it. false: it is none; the callers say what would be right. */
bool calc_number(const char *text, double least, double most, double *out);
bool calc_integer(const char *text, int least, int most, int *out);
/* "400", "400G", "400Gb/s", "100000M", "1.6T", or a name as NDR: Gb/s. */
bool calc_rate(const char *text, double *gbit);
bool calc_same(const char *a, const char *b);      /* letters of either case, '-' as '_' */

/* PCIe of a generation and a number of lanes. */
struct calc_pcie { int generation, lanes; double gts, lane_gbs, link_gbs, nccl_gbs; };
/* generation: "5", "5.0", "gen5" or "32GT/s"; lanes: "16" or "x16". Refuses, naming the word. */
int calc_read_pcie(const struct calc *c, const char *generation, const char *lanes, struct calc_pcie *out);

#endif

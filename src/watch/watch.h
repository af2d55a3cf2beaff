/* What a communicator can say of itself: which path each pair of ranks uses and why not a better one, whether that is what
 * the user demanded (TELPHER_EXPECT), its last operations (flight recorder), and whether it is as fast as predicted (pace). */
#ifndef TP_WATCH_WATCH_H
#define TP_WATCH_WATCH_H

#include <stdio.h>
#include "base/base.h"

/* The path of one pair; without pointers, so that ranks can gather it. */
struct tp_watch_path {
	int32_t from, to;
	bool same_host;
	char via[32];               /* "SHM/CMA", "NET/Socket/0" */
	char why[320];              /* why not a better one; "" where there is none */
	/* What the topology says; "" and 0 where it isn't known. */
	char type[8];               /* how the two are joined: "NVL", "PIX", … */
	char device[32];            /* the network device of the sender */
	char code[40];              /* of each better path that is refused: "cpu-bridge", for programs */
	float gbps, latency_us;     /* expected: GB/s one way */
	int8_t gdr;                 /* NICs at GPU memory: 1, 0; -1: no matter of this pair */
	int32_t devices;            /* that the pair's channels are spread over: device is the first's; 0 and 1: that alone */
};
/* A better kind of path that a pair doesn't take. code: stable, for programs; text: a sentence, "" where only the code is known. */
struct tp_watch_refusal { char kind[12], code[20], text[320]; };
/* What a channel of a pair uses, where channels differ; as in struct tp_watch_path. */
struct tp_watch_channel { char device[32]; float gbps, latency_us; };

struct tp_watch_paths;
ncclResult_t tp_watch_paths_create(struct tp_watch_paths **out);
void tp_watch_paths_destroy(struct tp_watch_paths *paths);
/* A pair that is there already is replaced. Texts that don't end are cut (they may come from a peer). */
ncclResult_t tp_watch_paths_add(struct tp_watch_paths *paths, const struct tp_watch_path *path);
size_t tp_watch_paths_count(const struct tp_watch_paths *paths);
/* A table, a line for each (via, why), with its pairs: "0-1" both ways, "2>3" one way. Any number of pairs makes a table
 * of bounded width. */
void tp_watch_paths_print(const struct tp_watch_paths *paths, FILE *out);

/* The same for programs: the text of one JSON value each, well-formed whatever a peer's texts hold and whatever the program's locale. */
void tp_watch_json_string(FILE *out, const char *text);
void tp_watch_json_number(FILE *out, double value);     /* to a millionth; null where there is none (infinite, not a number) */
/* An object: from, to, same_host, via, type, device, gdr, bandwidth_gbs, latency_us, note, refused, channels. What isn't known is null;
 * channels is left out where all are alike. */
void tp_watch_json_path(FILE *out, const struct tp_watch_path *path, const struct tp_watch_refusal *refusals, int nrefusals,
	const struct tp_watch_channel *channels, int nchannels);

/* TELPHER_EXPECT: a list, or a file with one: key and =, >= or <=, value; alternatives divided by |, compared without case; items by blanks,
 * commas or lines; # to the end of a line is a comment. Of a communicator:
 *   path=SHM            every pair's path; local=… and remote=… those inside a host and between hosts
 *   net=IB              the network transport
 *   algo=RING           the algorithm of every collective
 * "SHM" is met by "SHM/CMA", "NET" by "NET/Socket/0": whole parts from the left. */
enum tp_expect_unit { TP_EXPECT_TEXT, TP_EXPECT_WORD, TP_EXPECT_COUNT, TP_EXPECT_LEAST };        /* LEAST: more is better: written with >= */
enum tp_expect_relation { TP_EXPECT_EQUAL, TP_EXPECT_AT_LEAST, TP_EXPECT_AT_MOST };
struct tp_expect_key { const char *name; enum tp_expect_unit unit; const char *words, *doc; };     /* words: of a WORD, "on|off" */
struct tp_expect_item {
	const struct tp_expect_key *key;        /* NULL: the list ends here */
	enum tp_expect_relation relation;
	const char *text, *value;               /* in the list: the item as it was written; its value */
	int text_bytes;
	size_t value_bytes;
	double number;                          /* of COUNT and LEAST */
};
/* Takes the next item off the list. keys: what the caller can look at, besides the keys of a communicator. What can't be read is
 * ncclInvalidArgument, with name in front. */
ncclResult_t tp_expect_next(const char **list, const char *name, const struct tp_expect_key *keys, size_t nkeys, struct tp_expect_item *out);
bool tp_expect_is_own(const struct tp_expect_key *key);     /* a communicator's: path, local, … */
bool tp_expect_one_of(const char *alternatives, size_t bytes, const char *word);
bool tp_expect_holds(const struct tp_expect_item *item, double number);
/* An expectation that can't be read is ncclInvalidArgument. Call once at init. _with: with the keys of others. */
ncclResult_t tp_watch_expect_check(void);
ncclResult_t tp_watch_expect_check_with(const struct tp_expect_key *keys, size_t nkeys);
bool tp_watch_expect_is_set(void);
/* The list itself, a file's where one is named; *out NULL: there is none. */
ncclResult_t tp_watch_expect_text(const char **out);
/* Something isn't as expected: ncclInvalidUsage; under TELPHER_EXPECT_MODE=warn a WARN and ncclSuccess. */
ncclResult_t tp_watch_expect_unmet(const char *text);
/* Is found what was expected of key? subject says of what ("rank 0 -> 1", "the communicator"); why may be NULL. Not met:
 * ncclInvalidUsage, with what was found and why. No expectation of key: ncclSuccess. */
ncclResult_t tp_watch_expect(const char *key, const char *found, const char *subject, const char *why);
/* path, local and remote, over all pairs that aren't a rank with itself; the error counts them and names the first. */
ncclResult_t tp_watch_expect_paths(const struct tp_watch_paths *paths);

/* The flight recorder: the last operations of a communicator, in a fixed ring. Begin and end are plain stores to one
 * cache line and a coarse clock (milliseconds, which stalls are measured in): no lock, no allocation. One writer at a time
 * (whoever holds the communicator); any thread may dump meanwhile. */
enum tp_flight_state { TP_FLIGHT_EMPTY, TP_FLIGHT_RUNNING, TP_FLIGHT_DONE };

struct tp_flight_record {
	_Atomic uint64_t seq;               /* stored last at begin (release; the dump's acquire), 0 while it changes */
	_Atomic uint64_t count, start_ns, end_ns;      /* tp_clock_coarse_ns */
	_Atomic int32_t root, result;
	_Atomic uint8_t func, type, op, state;
	char pad[TP_CACHE_LINE - 4 * 8 - 2 * 4 - 4];
};
_Static_assert(sizeof(struct tp_flight_record) == TP_CACHE_LINE, "a record is one cache line");

struct tp_flight {
	struct tp_flight_record *records;   /* [mask + 1] */
	uint64_t mask, next;                /* next: the writer's */
	uint64_t comm_hash;
	int32_t rank, nranks;
	const char *(*func_name)(int func);
};

/* TELPHER_FLIGHT_RECORDS operations are kept (rounded up to a power of two). func_name names a record's func. */
ncclResult_t tp_flight_create(int rank, int nranks, uint64_t comm_hash, const char *(*func_name)(int func), struct tp_flight **out);
void tp_flight_destroy(struct tp_flight *flight);

static inline struct tp_flight_record *tp_flight_begin(struct tp_flight *flight, uint64_t seq, int func, uint64_t count,
	int type, int op, int root)
{
	struct tp_flight_record *r = &flight->records[flight->next++ & flight->mask];
	atomic_store_explicit(&r->seq, 0, memory_order_relaxed);
	/* Each release pairs with the dump's acquire: a dump that sees anything of the new record then sees that seq changed. */
	atomic_store_explicit(&r->count, count, memory_order_release);
	atomic_store_explicit(&r->start_ns, tp_clock_coarse_ns(), memory_order_release);
	atomic_store_explicit(&r->end_ns, 0, memory_order_release);
	atomic_store_explicit(&r->root, root, memory_order_release);
	atomic_store_explicit(&r->result, ncclInProgress, memory_order_release);
	atomic_store_explicit(&r->func, (uint8_t)func, memory_order_release);
	atomic_store_explicit(&r->type, (uint8_t)type, memory_order_release);
	atomic_store_explicit(&r->op, (uint8_t)op, memory_order_release);
	atomic_store_explicit(&r->state, TP_FLIGHT_RUNNING, memory_order_release);
	atomic_store_explicit(&r->seq, seq, memory_order_release);
	return r;
}

/* seq: of its begin. A record that newer operations have taken over since is left alone. */
static inline void tp_flight_end(struct tp_flight_record *record, uint64_t seq, ncclResult_t result)
{
	if (atomic_load_explicit(&record->seq, memory_order_relaxed) != seq)
		return;
	atomic_store_explicit(&record->end_ns, tp_clock_coarse_ns(), memory_order_relaxed);
	atomic_store_explicit(&record->result, result, memory_order_relaxed);
	/* Pairs with the dump's acquire of state: a record that is done has its time and result. */
	atomic_store_explicit(&record->state, TP_FLIGHT_DONE, memory_order_release);
}

/* One operation in words; what the dump writes. */
struct tp_flight_entry {
	uint64_t seq, count, start_ns, end_ns;  /* tp_clock_coarse_ns; end_ns 0 while it runs */
	int32_t root, func, type, op;
	enum tp_flight_state state;
	ncclResult_t result;
};
/* The last operations, oldest first, at most max; returns how many. */
size_t tp_flight_read(const struct tp_flight *flight, struct tp_flight_entry *out, size_t max);
/* Writes the last max operations to the log, where WARN lines go; the last error stays. */
void tp_flight_dump(const struct tp_flight *flight, size_t max, const char *why);
/* On an error or a stall: dumps the last TELPHER_DUMP_ON_ERROR operations (0: none). */
void tp_flight_dump_on_error(const struct tp_flight *flight, const char *why);

/* How busy the machine is (busy.c). For how long the calling thread has been ready to run since begin, while others had its processor; unknown: it
 * is another thread now, or the system doesn't say. */
#define TP_DELAY_UNKNOWN 1e12f
struct tp_delay { int thread; uint64_t delay_ns; };
void tp_delay_begin(struct tp_delay *since);
float tp_delay_us(const struct tp_delay *since);
/* Of all processors' time since the last look, what the host of this virtual machine took: 0 to 1; at the first look, and where nobody says, 0. */
struct tp_stolen { uint64_t all, stolen; };
float tp_stolen_share(struct tp_stolen *since);

/* The pace (pace.c): of the last operations, how many times as long as predicted they took. All ranks add the same operations, and are so
 * told at the same ones to compare their windows; whoever judges, judges the least of all ranks, each by itself and all alike. */
#define TP_PACE_SAMPLES 32
#define TP_PACE_SLOW_RATIO 2.0f         /* "under half of it" */
struct tp_pace {
	float ratio[TP_PACE_SAMPLES];       /* of operation i since the last comparison: [i % TP_PACE_SAMPLES] */
	uint32_t count, wanted;             /* operations since then; so many make it time for the next */
	uint32_t first;                     /* so many at first, and while something may be wrong */
	uint32_t slow;                      /* windows in a row … */
	float slow_s, wanted_s;             /* … that took so long; so long makes them suspect */
	uint32_t skipped, patience;         /* windows that pass without a comparison: still to come; after the next look that finds nothing */
};
void tp_pace_begin(struct tp_pace *pace, uint32_t first, float seconds);
/* true: it is time to compare. */
bool tp_pace_add(struct tp_pace *pace, double took_us, double predicted_us);
void tp_pace_window(const struct tp_pace *pace, float out[TP_PACE_SAMPLES]);
/* By this rank's own times alone, could the judge say true? Where he does, it is so on every rank. elapsed_s: since the last comparison. */
bool tp_pace_may_suspect(const struct tp_pace *pace, float elapsed_s);
/* least: of each place of the window, the least of all ranks; elapsed_s: the same. true: it was slow for long enough to look at the pairs.
 * *median: of the window. */
bool tp_pace_judge(struct tp_pace *pace, const float least[TP_PACE_SAMPLES], float elapsed_s, float *median);
/* A look found something: as many slow windows as before the first, and there is another. */
void tp_pace_begin_anew(struct tp_pace *pace);
/* It found nothing: the next one is not before long. */
void tp_pace_put_off(struct tp_pace *pace);

#endif

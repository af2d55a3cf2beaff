/* Between the files that watch a communicator's pace: pace.c compares the ranks' times, pace_pairs.c says who measures with whom, pace_measure.c
 * measures, pace_sum.c finds the slowest pair, pace_tell.c judges and tells. */
#ifndef TP_COMM_PACE_H
#define TP_COMM_PACE_H

#include "comm/internal.h"

/* What ranks tell each other at a time: of each value the least of all ranks, or the sum. */
#define TP_PACE_VALUES 64
#define TP_PACE_NONE 3e38f

/* Pairs that should be alike, where their ranks are as far apart by number too. Values: they travel. */
enum tp_pace_class {
	TP_PACE_CORE, TP_PACE_CACHE, TP_PACE_NUMA, TP_PACE_APART,   /* of one host, by what their processors share */
	TP_PACE_MACHINE,                                            /* hosts that are one machine */
	TP_PACE_REMOTE,
	TP_PACE_CLASSES
};

enum tp_pace_stage {
	TP_PACE_IDLE,
	TP_PACE_COMPARE,            /* windows */
	TP_PACE_SHARE,              /* a look begins: which rounds anybody has a part in */
	TP_PACE_MEET,               /* before each turn: nobody is late */
	TP_PACE_GREET,              /* a turn: a short message, … */
	TP_PACE_MOVE,               /* … and a long one behind it */
	TP_PACE_EXTREMES,           /* of the rounds of one distance the best and the worst of each class, … */
	TP_PACE_SPREAD,             /* … how the pairs of one class lie between, … */
	TP_PACE_CLAIM,              /* … whose the worst pair is: the lowest rank with it, … */
	TP_PACE_NAME                /* … and its other end */
};

/* Turns of pairs that are as far apart, in which no rank has two parts. */
struct tp_pace_round {
	int distance;
	int sharing;                        /* so many pairs use a host's network at once, at most */
	bool used;                          /* some rank has a part: agreed */
	int from, to;                       /* from -1: this rank has no part */
	struct tp_plan *plan;               /* of the part; owned */
	float took_us;                      /* of the long messages: what the link took at least, whoever had the processors; TP_PACE_NONE: not known */
	float typical_us;                   /* the median of what it took at most */
	float spread_us;                    /* by how much that is more than the least: the surroundings' part, where the pair is healthy */
	float unrest;                       /* how many times as long as at least it took at most: processors' part, or others' */
};
#define TP_PACE_ROUNDS TP_PACE_VALUES
#define TP_PACE_USED 24                 /* so many are measured */
#define TP_PACE_ENOUGH 4                /* turns of a round that count, of every pair … */
#define TP_PACE_TURNS 12                /* … or so many turns in all */

struct tp_pace_found {                  /* the same on all ranks */
	enum tp_pace_class kind;
	int from, to;                       /* from -1: none */
	int from_host, to_host;
	float took_us, like_us;             /* of this pair the least; what is typical of the better ones of its like, 0: it has none */
	float expected_us;                  /* by figures that were measured; 0: there are none */
	float spread_us;                    /* the most of its class, of pairs that aren't far behind */
	float own_spread_us;                /* its own */
	float unrest;                       /* the most of all pairs */
};

enum tp_pace_verdict {
	TP_PACE_NOTHING,
	TP_PACE_BEHIND_LIKE,        /* a pair is far behind others like it */
	TP_PACE_BEHIND_FIGURES,     /* or behind what was measured */
	TP_PACE_ALL_SLOW            /* by measured figures the communicator is slow, and no pair more than others */
};

struct tp_comm_pace {
	struct tp_pace pace;
	enum tp_pace_stage stage;
	bool hurry;                         /* measure at every call, whatever that costs */
	enum tp_pace_stage due;             /* of a look: what follows behind the next call; TP_PACE_IDLE: a turn, after a rest */
	bool across, inside;                /* the model's figures of this kind of link were measured */
	uint32_t turn;                      /* calls of ours so far: part of their tags */
	float median;                       /* of the window that was judged last */
	uint64_t window_ns;                 /* when the window at hand began, here */
	struct tp_delay delay;              /* since then */
	struct tp_stolen stolen;
	float busy;                         /* of the slow windows' time, what threads waited for processors, at most; those that yield theirs are in it */
	float taken;                        /* of processors' time, what a virtual machine's host took, at most */
	float *in, *out;                    /* [nranks][TP_PACE_VALUES] */
	ncclRedOp_t asked;                  /* what is taken of all ranks' values */
	bool told;                          /* that nothing stands out */
	int grown;                          /* long messages are so many times fourfold: what stood out by less than its surroundings vary needs more of it */
	enum tp_pace_verdict was_verdict;   /* of the last look, and what it found */
	struct tp_pace_found was;
	uint64_t watched;                   /* calls */
	uint32_t compared, looks;
	/* A look: a turn behind a call, then none behind `rest` calls. */
	bool looking;
	uint32_t rest, rested;
	uint64_t turn_ns, rest_ns;          /* when the last turn began and ended */
	float cost_us;                      /* of the last turn, here */
	unsigned char *data;                /* NULL: not prepared */
	size_t bytes;                       /* of a long message … */
	size_t behind_bytes;                /* … that goes behind calls of so many */
	uint32_t passed;                    /* smaller ones since the last turn */
	struct tp_delay part_delay;         /* since the short message began */
	struct tp_pace_round rounds[TP_PACE_ROUNDS];
	int nrounds, round, turn_of_round;
	uint64_t part_ns;                   /* when the short or the long message began */
	bool waited;                        /* there was a look at what runs in which nothing could be moved */
	float last_us, last_delay_us;       /* of the last turn's long message, here; what this thread waited for a processor */
	float greet_delay_us;               /* the short message's part of it */
	int counted;                        /* turns of the round that count here … */
	bool counts;                        /* … and the last one does */
	float most_us[TP_PACE_TURNS], least_us[TP_PACE_TURNS];      /* of these: what the long message can have taken */
	struct tp_pace_found found, candidate;                      /* the worst so far; of the distance that is summed up */
	float best_us;                      /* of the candidate's class, at the median */
};

/* Starts a call that gives all ranks the least of each value in pace->in, or the sum, on op's own links. */
ncclResult_t tp_pace_ask(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage, ncclRedOp_t what);
void tp_pace_clear(struct tp_comm_pace *pace, float value);     /* all values of `in` */

/* pace_pairs.c. This rank's part in each round; as many rounds on all ranks. */
void tp_pace_pair_up(const struct ncclComm *comm, struct tp_comm_pace *pace);
enum tp_pace_class tp_pace_class_of(const struct ncclComm *comm, int a, int b);

/* pace_measure.c. All that may fail, before ranks agree to measure: memory, and plans over the links that op's plan has open between two ranks.
 * false: this rank can't. */
bool tp_pace_prepare(struct ncclComm *comm, const struct tp_plan *plan);
void tp_pace_release(struct ncclComm *comm);
void tp_pace_begin_look(struct tp_comm_pace *pace, size_t total_bytes);         /* they agreed, behind a call of so many bytes */
ncclResult_t tp_pace_take_turn(struct ncclComm *comm, struct tp_op *op);        /* or what is due */
bool tp_pace_waits(struct tp_comm_pace *pace, size_t total_bytes);              /* behind this call nothing is done; it may end the look */
/* What follows pace->stage. *idle: nothing does, behind this call; then, if pace->looking isn't set, the look is over. */
ncclResult_t tp_pace_measure(struct ncclComm *comm, struct tp_op *op, const float *answer, bool *idle);
size_t tp_pace_bytes(size_t total_bytes, bool hurry, int grown);        /* of a long message behind a call of so many */
#define TP_PACE_MOST_GROWN 2
bool tp_pace_may_grow(const struct tp_comm_pace *pace);                 /* are longer ones left to try, after a look? */
float tp_pace_took_us(const float *least, int turns);   /* sorted: what the link took at least, by most of them */
/* Calls until the next turn, of which the last cost so much after so many calls, in a communicator that takes so many times as long as it should. */
uint32_t tp_pace_rest(float cost_us, float elapsed_us, uint32_t calls, float slowness);
bool tp_pace_has_enough(int turns, int least_counted, float slowest_us);        /* of a round: so many count of the pair with the fewest */
bool tp_pace_is_far_behind(float took_us, float like_us);

/* pace_sum.c: the rounds of one distance are over. Asks what a stage asks; what it answers says what is due, or (*done) pace->found is the worst so far. */
ncclResult_t tp_pace_sum_up(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage);
ncclResult_t tp_pace_go_on_summing(struct ncclComm *comm, const float *answer, bool *done);
#define TP_PACE_BUCKETS TP_PACE_VALUES  /* of times between the best one and the worst, four for each doubling */
int tp_pace_bucket(float us, float best_us);
float tp_pace_like_us(const float counts[TP_PACE_BUCKETS], float best_us);      /* 0: there are no two pairs */

/* pace_tell.c. Of what was found: */
enum tp_pace_end {
	TP_PACE_CALM,               /* nothing stands out, or each time something else */
	TP_PACE_LARGER,             /* something may, but times vary by as much: with longer messages it would show */
	TP_PACE_ONCE_MORE,          /* something does, for the first time */
	TP_PACE_WARNED              /* again; rank 0 has said so */
};
enum tp_pace_end tp_pace_tell(struct ncclComm *comm, const struct tp_op *op);
enum tp_pace_end tp_pace_weigh(struct tp_comm_pace *pace, bool measured, enum tp_pace_verdict *verdict);        /* the same, said to nobody */
/* Why there is another look, and at what. */
void tp_pace_describe_look(const struct tp_comm_pace *pace, enum tp_pace_verdict verdict, enum tp_pace_end end, char *text, size_t bytes);
float tp_pace_expected_us(const struct ncclComm *comm, enum tp_pace_class kind, size_t bytes);

#endif

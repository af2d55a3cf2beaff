/* Between the files that watch a communicator's pace: pace.c compares the ranks' times, pace_pairs.c measures pairs, pace_tell.c judges and
 * tells. */
#ifndef TP_COMM_PACE_H
#define TP_COMM_PACE_H

#include "comm/internal.h"

/* What ranks tell each other at a time: of each value the least of all ranks. */
#define TP_PACE_VALUES 40
#define TP_PACE_NONE 3e38f

/* Pairs that should be alike. Values: they travel. */
enum tp_pace_class {
	TP_PACE_CORE, TP_PACE_CACHE, TP_PACE_NUMA, TP_PACE_APART,   /* of one host, by what their processors share */
	TP_PACE_MACHINE,                                            /* hosts that are one machine */
	TP_PACE_REMOTE,
	TP_PACE_CLASSES
};

enum tp_pace_stage {
	TP_PACE_IDLE,
	TP_PACE_COMPARE,            /* windows */
	TP_PACE_MEET,               /* before each measurement: nobody is late */
	TP_PACE_MOVE,               /* a measurement */
	TP_PACE_SUM_UP,             /* the best and the worst of each class */
	TP_PACE_CLAIM,              /* whose pair it is: the lowest rank with the worst */
	TP_PACE_NAME                /* its other end */
};

/* A measurement of one phase, in which no rank has two parts. */
struct tp_pace_round {
	int from, to;                       /* from -1: this rank has no part */
	float took_us, typical_us;          /* the least of the turns, their median */
	float spread_us;                    /* by how much more the turns took at the median: the surroundings' part */
	float unrest;                       /* how many times as long a short message took at the median as at its least */
};
#define TP_PACE_ROUNDS 64
#define TP_PACE_SHORT 5                 /* turns of a round, behind one that connects: short messages, … */
#define TP_PACE_LONG 5                  /* … then long ones */

struct tp_pace_found {                  /* the same on all ranks */
	enum tp_pace_class kind;
	int from, to;
	float took_us, best_us;             /* of this pair the least; of the best of its like what is typical */
	float expected_us;                  /* by figures that were measured; 0: there are none */
	float spread_us;                    /* of this pair */
	float unrest;                       /* the most of all pairs */
};

struct tp_comm_pace {
	struct tp_pace pace;
	enum tp_pace_stage stage;
	bool measured;                      /* the model's figures were, as all ranks say */
	uint32_t turn;                      /* calls of ours so far: part of their tags */
	float median;                       /* of the window that is judged */
	float *in, *out;                    /* [nranks][TP_PACE_VALUES] */
	bool told;                          /* that nothing stands out */
	bool accused;                       /* the last look found something: `was` */
	struct tp_pace_found was;
	/* Measuring. */
	unsigned char *data;                /* NULL: not now */
	struct tp_plan *plan;
	struct tp_exec_transfer transfer;
	struct tp_pace_round rounds[TP_PACE_ROUNDS];
	int nrounds, round, turn_of_round;
	uint64_t move_ns;                   /* when the transfer began */
	float last_us;
	float times_us[TP_PACE_SHORT + TP_PACE_LONG];       /* of the round */
	struct tp_pace_found found;
};

/* Starts a call that gives all ranks the least of each value in pace->in, on op's own links. */
ncclResult_t tp_pace_ask(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage);
/* pace_pairs.c: memory for measuring; false: none. The next step after `stage`, whose answer is there; *done: it is over, pace->found is known. */
bool tp_pace_prepare(struct tp_comm_pace *pace);
void tp_pace_release(struct tp_comm_pace *pace);
void tp_pace_pair_up(const struct ncclComm *comm, struct tp_comm_pace *pace);   /* this rank's part in each round; as many rounds on all ranks */
ncclResult_t tp_pace_measure(struct ncclComm *comm, struct tp_op *op, const float *answer, bool *done);
size_t tp_pace_bytes(void);             /* of a measurement */
/* pace_tell.c. Of what was found: */
enum tp_pace_end {
	TP_PACE_CALM,               /* nothing stands out */
	TP_PACE_ONCE_MORE,          /* something does, for the first time */
	TP_PACE_WARNED              /* again; rank 0 has said so */
};
enum tp_pace_end tp_pace_tell(struct ncclComm *comm, const struct tp_op *op);
float tp_pace_expected_us(const struct ncclComm *comm, enum tp_pace_class kind, size_t bytes);

#endif

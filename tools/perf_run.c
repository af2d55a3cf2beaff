/* Runs the ranks of this process: a thread for each `-t`, `-g` ranks in each, all calls of a thread in one group. */
#include "perf.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "base/pages.h"

struct worker {
	const struct perf_options *o;
	int nranks, first_rank;
	ncclComm_t *comms;              /* [ngpus] */
	ncclRedOp_t *mulsum;            /* [ngpus]; made for one type at a time */
	char **send, **recv;            /* [ngpus], of the greatest size each */
};

static double now_us(void) { return (double)tp_clock_ns() * 1e-3; }

/* A rank that failed ends its process at once: the ranks of other threads would wait for it. */
static _Noreturn void quit(void)
{
	fflush(stdout);
	_exit(1);
}

static void expect_success(const struct worker *w, ncclResult_t result, const char *what)
{
	if (result == ncclSuccess) return;
	fprintf(stderr, "telpher perf: rank %d: %s: %s: %s\n", w->first_rank, what, ncclGetErrorString(result), ncclGetLastError(NULL));
	quit();
}

struct call { ncclDataType_t type; int op, root; size_t count; bool in_place; };

static ncclResult_t call_one(struct worker *w, int g, const struct call *c)
{
	ncclComm_t comm = w->comms[g];
	int rank = w->first_rank + g;
	ncclRedOp_t op = c->op == PERF_MUL_SUM ? w->mulsum[g] : (ncclRedOp_t)(c->op < 0 ? 0 : c->op);
	size_t block = c->count * perf_type_bytes((int)c->type);
	const struct perf_coll_info *info = &perf_colls[w->o->coll];
	char *recv = w->recv[g], *send = w->send[g];
	if (c->in_place) {
		/* NCCL's in-place forms: the same buffer, or this rank's block of the larger one. */
		if (info->recv_is_large && !info->send_is_large) send = recv + (size_t)rank * block;
		else if (info->send_is_large && !info->recv_is_large) recv = send + (size_t)rank * block;
		else send = recv;
	}
	switch (w->o->coll) {
	case PERF_ALL_REDUCE: return ncclAllReduce(send, recv, c->count, c->type, op, comm, NULL);
	case PERF_ALL_GATHER: return ncclAllGather(send, recv, c->count, c->type, comm, NULL);
	case PERF_REDUCE_SCATTER: return ncclReduceScatter(send, recv, c->count, c->type, op, comm, NULL);
	case PERF_BROADCAST: return ncclBroadcast(send, recv, c->count, c->type, c->root, comm, NULL);
	case PERF_REDUCE: return ncclReduce(send, recv, c->count, c->type, op, c->root, comm, NULL);
	case PERF_ALL_TO_ALL: return ncclAlltoAll(send, recv, c->count, c->type, comm, NULL);
	case PERF_GATHER: return ncclGather(send, recv, c->count, c->type, c->root, comm, NULL);
	case PERF_SCATTER: return ncclScatter(send, recv, c->count, c->type, c->root, comm, NULL);
	default: {
		ncclResult_t r = ncclSend(send, c->count, c->type, (rank + 1) % w->nranks, comm, NULL);
		return r != ncclSuccess ? r : ncclRecv(recv, c->count, c->type, (rank + w->nranks - 1) % w->nranks, comm, NULL);
	}
	}
}

static ncclResult_t call_all(struct worker *w, const struct call *c, int times)
{
	bool grouped = w->o->ngpus > 1 || times > 1 || w->o->coll == PERF_SEND_RECV;
	if (!grouped) return call_one(w, 0, c);
	ncclResult_t r = ncclGroupStart();
	for (int k = 0; k < times; k++)
		for (int g = 0; g < w->o->ngpus && r == ncclSuccess; g++) r = call_one(w, g, c);
	ncclResult_t end = ncclGroupEnd();
	return r != ncclSuccess ? r : end;
}

/* All threads' values folded by op; a barrier too. */
static ncclResult_t fold(struct worker *w, double *value, ncclRedOp_t op)
{
	double other = op == ncclSum ? 0 : *value, result[PERF_MOST_RANKS];
	ncclResult_t r = ncclGroupStart();
	for (int g = 0; g < w->o->ngpus && r == ncclSuccess; g++)
		r = ncclAllReduce(g ? &other : value, &result[g], 1, ncclFloat64, op, w->comms[g], NULL);
	ncclResult_t end = ncclGroupEnd();
	if (r == ncclSuccess) r = end;
	if (r == ncclSuccess) *value = result[0];
	return r;
}

static int iterations(const struct perf_options *o, size_t bytes)
{
	if (o->iters) return o->iters;
	return bytes <= 4096 ? 2000 : bytes <= 65536 ? 500 : bytes <= 1 << 20 ? 100 : 20;
}

static ncclResult_t measure(struct worker *w, const struct call *c, size_t bytes, double *us)
{
	double none = 0;
	ncclResult_t r = ncclSuccess;
	for (int i = 0; i < w->o->warmup && r == ncclSuccess; i++) r = call_all(w, c, w->o->aggregate);
	if (r == ncclSuccess) r = fold(w, &none, ncclSum);
	if (r != ncclSuccess) return r;
	int iters = iterations(w->o, bytes);
	double start = now_us();
	for (int i = 0; i < iters && r == ncclSuccess; i++) r = call_all(w, c, w->o->aggregate);
	double mine = (now_us() - start) / iters / w->o->aggregate;
	if (r != ncclSuccess) return r;
	if (w->o->average == 0 && w->first_rank != 0) mine = 0;
	ncclRedOp_t op = w->o->average == 2 ? ncclMin : w->o->average == 3 ? ncclMax : ncclSum;
	r = fold(w, &mine, op);
	if (w->o->average == 1) mine /= w->nranks / w->o->ngpus;    /* fold adds one value a thread */
	*us = mine;
	return r;
}

/* One call, whatever -m says: in place a second one would start from the first one's result. */
static ncclResult_t check(struct worker *w, const struct call *c, uint64_t seed, int64_t *wrong)
{
	const struct perf_coll_info *info = &perf_colls[w->o->coll];
	size_t nr = (size_t)w->nranks, block = c->count * perf_type_bytes((int)c->type);
	for (int g = 0; g < w->o->ngpus; g++) {
		int rank = w->first_rank + g;
		bool own_recv = !c->in_place || !(info->send_is_large && !info->recv_is_large);
		if (own_recv) memset(w->recv[g], 0xa5, block * (info->recv_is_large ? nr : 1));
		char *at = w->send[g];
		if (c->in_place && info->recv_is_large && !info->send_is_large) at = w->recv[g] + (size_t)rank * block;
		else if (c->in_place && info->recv_is_large == info->send_is_large) at = w->recv[g];
		perf_fill(w->o, (int)c->type, c->op, rank, w->nranks, at, info->send_is_large ? nr : 1, c->count, seed);
	}
	ncclResult_t r = call_all(w, c, 1);
	double found = 0;
	for (int g = 0; g < w->o->ngpus && r == ncclSuccess; g++) {
		int rank = w->first_rank + g;
		if (!perf_receives(w->o->coll, c->root, rank)) continue;
		const char *at = w->recv[g];
		if (c->in_place && info->send_is_large && !info->recv_is_large) at = w->send[g] + (size_t)rank * block;
		found += (double)perf_wrong(w->o, (int)c->type, c->op, c->root, rank, w->nranks, at, c->count, seed);
	}
	if (r == ncclSuccess) r = fold(w, &found, ncclSum);
	*wrong += (int64_t)found;
	return r;
}

static ncclResult_t sample(struct worker *w, struct call *c, bool in_place, size_t bytes, struct perf_sample *out)
{
	c->in_place = in_place;
	*out = (struct perf_sample){ .wrong = -1 };
	/* All-to-all and send/recv have no in-place form. */
	if (in_place && (w->o->coll == PERF_ALL_TO_ALL || w->o->coll == PERF_SEND_RECV)) return ncclSuccess;
	ncclResult_t r = measure(w, c, bytes, &out->us);
	if (w->o->check > 0) out->wrong = 0;
	for (int k = 0; k < w->o->check && r == ncclSuccess; k++) r = check(w, c, bytes * 31 + (uint64_t)k * 7, &out->wrong);
	out->algbw = out->us > 0 ? (double)bytes / out->us * 1e-3 : 0;
	out->busbw = out->algbw * perf_bus_factor(w->o->coll, w->nranks);
	return r;
}

static size_t count_for(const struct perf_options *o, size_t bytes, size_t type_bytes, int nranks)
{
	size_t count = bytes / type_bytes;
	if (!perf_colls[o->coll].block_per_rank) return count;
	size_t unit = 16 / type_bytes;              /* as nccl-tests: blocks are multiples of 16 bytes … */
	size_t block = count / (size_t)nranks;
	return block >= unit ? block / unit * unit : block;     /* … but not rounded down to nothing */
}

static ncclResult_t run_line(struct worker *w, size_t bytes, int type, int op, int root)
{
	size_t count = count_for(w->o, bytes, perf_type_bytes(type), w->nranks);
	size_t blocks = perf_colls[w->o->coll].block_per_rank ? (size_t)w->nranks : 1;
	struct call c = { (ncclDataType_t)type, op, root, count, false };
	struct perf_line line = { .bytes = count * blocks * perf_type_bytes(type), .count = count, .type = c.type, .op = op, .root = root };
	ncclResult_t r = ncclSuccess;
	if (op == PERF_MUL_SUM) {
		for (int g = 0; g < w->o->ngpus && r == ncclSuccess; g++) {
			char scalar[8];
			perf_encode_scalar(type, w->first_rank + g, scalar);
			r = ncclRedOpCreatePreMulSum(&w->mulsum[g], scalar, c.type, ncclScalarHostImmediate, w->comms[g]);
		}
	}
	if (r == ncclSuccess) r = sample(w, &c, false, line.bytes, &line.out_of_place);
	if (r == ncclSuccess) r = sample(w, &c, true, line.bytes, &line.in_place);
	if (op == PERF_MUL_SUM)
		for (int g = 0; g < w->o->ngpus && r == ncclSuccess; g++) r = ncclRedOpDestroy(w->mulsum[g], w->comms[g]);
	if (r == ncclSuccess && w->first_rank == 0) perf_add_line(&line);
	return r;
}

/* The next size: by an element more at least, from 0 on too. */
static size_t next_size(const struct perf_options *o, size_t bytes, size_t type_bytes)
{
	if (!(o->step_factor > 1)) return bytes + o->step_bytes;
	double next = (double)bytes * o->step_factor;
	return next > (double)o->max_bytes ? o->max_bytes + 1 : TP_MAX((size_t)next, bytes + type_bytes);
}

static ncclResult_t run_lines(struct worker *w)
{
	const struct perf_options *o = w->o;
	const struct perf_coll_info *info = &perf_colls[o->coll];
	ncclResult_t r = ncclSuccess;
	for (int t = 0; t < o->ntypes; t++) {
		for (int p = 0; p < (info->reduces ? o->nops : 1); p++) {
			int first = info->rooted ? (o->root < 0 ? 0 : o->root) : -1;
			int last = info->rooted && o->root < 0 ? w->nranks - 1 : first;
			for (int root = first; root <= last; root++) {
				for (size_t bytes = o->min_bytes; bytes <= o->max_bytes && r == ncclSuccess; bytes = next_size(o, bytes, perf_type_bytes(o->types[t])))
					r = run_line(w, bytes, o->types[t], info->reduces ? o->ops[p] : -1, root);
			}
		}
	}
	return r;
}

static size_t buffer_bytes(const struct worker *w) { return TP_MAX(w->o->max_bytes, (size_t)64); }

static void allocate(struct worker *w)
{
	size_t bytes = buffer_bytes(w);
	for (int g = 0; g < w->o->ngpus; g++) {
		void **both[2] = { (void **)&w->send[g], (void **)&w->recv[g] };
		for (int k = 0; k < 2; k++) {
			*both[k] = tp_pages_map(bytes);
			if (!*both[k]) {
				fprintf(stderr, "telpher perf: rank %d: no memory for a buffer of %zu bytes\n", w->first_rank + g, bytes);
				quit();
			}
			/* Like arrays of NumPy and its like. */
			tp_pages_want_large(*both[k], bytes);
			memset(*both[k], k, bytes);
			/* The handle is the communicator's, as in a program that keeps its buffers to the end. */
			void *handle;
			if (w->o->registers) expect_success(w, ncclCommRegister(w->comms[g], *both[k], bytes, &handle), "ncclCommRegister");
		}
	}
}

static ncclResult_t init(struct worker *w)
{
	ncclResult_t r = ncclGroupStart();
	for (int g = 0; g < w->o->ngpus && r == ncclSuccess; g++)
		r = ncclCommInitRank(&w->comms[g], w->nranks, w->o->id, w->first_rank + g);
	ncclResult_t end = ncclGroupEnd();
	return r != ncclSuccess ? r : end;
}

static void *work(void *arg)
{
	struct worker *w = arg;
	expect_success(w, init(w), "init");
	allocate(w);
	expect_success(w, run_lines(w), perf_colls[w->o->coll].name);
	return NULL;
}

static void end(struct worker *w)
{
	for (int g = 0; g < w->o->ngpus; g++) {
		ncclCommDestroy(w->comms[g]);
		tp_pages_unmap(w->send[g], buffer_bytes(w));
		tp_pages_unmap(w->recv[g], buffer_bytes(w));
	}
	free(w->comms);
	free(w->mulsum);
	free(w->send);
	free(w->recv);
}

int perf_run(const struct perf_options *o)
{
	int nranks = o->nprocs * o->nthreads * o->ngpus;
	char host[64] = "host";
	gethostname(host, sizeof(host) - 1);
	if (o->proc == 0) {
		perf_print_head(o, nranks);
		for (int r = 0; r < o->nthreads * o->ngpus; r++) perf_print_device(r, (int)getpid(), host, r);
		if (o->nprocs > 1) printf("#  and %d more processes of %d rank(s) each\n", o->nprocs - 1, o->nthreads * o->ngpus);
		perf_print_columns();
		fflush(stdout);
	}
	struct worker *workers = calloc((size_t)o->nthreads, sizeof(*workers));
	pthread_t *threads = calloc((size_t)o->nthreads, sizeof(*threads));
	if (!workers || !threads) { fprintf(stderr, "telpher perf: out of memory\n"); quit(); }
	for (int t = 0; t < o->nthreads; t++) {
		struct worker *w = &workers[t];
		size_t n = (size_t)o->ngpus;
		*w = (struct worker){ .o = o, .nranks = nranks, .first_rank = (o->proc * o->nthreads + t) * o->ngpus,
			.comms = calloc(n, sizeof(ncclComm_t)), .mulsum = calloc(n, sizeof(ncclRedOp_t)),
			.send = calloc(n, sizeof(char *)), .recv = calloc(n, sizeof(char *)) };
		if (t && pthread_create(&threads[t], NULL, work, w)) {
			fprintf(stderr, "telpher perf: thread %d could not be started\n", t);
			quit();
		}
	}
	work(&workers[0]);
	for (int t = 1; t < o->nthreads; t++) pthread_join(threads[t], NULL);
	int status = o->proc == 0 ? perf_finish(o, nranks) : 0;
	/* What the library reports at the end of a communicator comes below the table. */
	for (int t = 0; t < o->nthreads; t++) end(&workers[t]);
	free(workers);
	free(threads);
	return status;
}

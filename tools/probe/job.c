/* Data over a link; see job.h. */
#include "probe/job.h"

#include <arpa/inet.h>
#include <errno.h>
#include <sched.h>
#include <string.h>

#define SIGNAL_EVERY 16
#define YIELD_EVERY 256                     /* polls that find nothing */
#define LOOK_NS 50000000u

/* Of a completion: which queue pair, and how far its queue is done with it. */
static uint64_t wr_id(bool in, uint32_t q, uint64_t r) { return (uint64_t)in << 63 | (uint64_t)q << 48 | (r & 0xffffffffffff); }

static uint64_t receives_at(const struct probe_job *job, uint32_t q)
{
	uint64_t requests = probe_requests(&job->shape, q);
	if (job->op == PROBE_SEND) return requests;
	return job->op == PROBE_WRITE && job->notice && requests > 0 ? 1 : 0;
}

static int post_receives(struct probe_job *job, uint32_t q)
{
	struct probe_way *way = &job->ways[q];
	uint64_t total = receives_at(job, q);
	while (way->posted_in < total && way->posted_in - way->in < job->link->depth) {
		struct ibv_sge sge = { .lkey = job->memory->mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = wr_id(true, q, way->posted_in) }, *bad;
		if (job->op == PROBE_SEND) {
			struct probe_piece piece = probe_piece_of(&job->shape, q, way->posted_in);
			sge.addr = (uint64_t)(uintptr_t)job->memory->ptr + job->in_at + piece.offset;
			sge.length = (uint32_t)piece.bytes;
			wr.sg_list = &sge;
			wr.num_sge = 1;
		}
		int error = ibv_post_recv(job->link->qps[q], &wr, &bad);
		if (error) return probe_fail("%s: a receive can't be posted: %s", job->link->port->ib->text, strerror(error));
		way->posted_in++;
	}
	return 0;
}

int probe_job_prepare(struct probe_job *job)
{
	memset(job->ways, 0, sizeof(job->ways));
	job->left_out = job->left_in = job->imm = job->ns = 0;
	job->idle = 0;
	job->allowed = job->us ? 0 : UINT32_MAX;
	for (uint32_t q = 0; q < job->shape.nqps; q++) {
		if (job->out) job->left_out += probe_requests(&job->shape, q);
		if (!job->in) continue;
		job->left_in += receives_at(job, q);
		int status = post_receives(job, q);
		if (status) return status;
	}
	return 0;
}

/* The low 32 bits of what a queue pair carries: the whole of it where it fits. */
static uint32_t immediate_of(const struct probe_job *job, uint32_t q)
{
	uint64_t offset, bytes;
	if (job->shape.count) return (uint32_t)job->shape.bytes;
	probe_share(&job->shape, q, &offset, &bytes);
	return (uint32_t)bytes;
}

static int post_requests(struct probe_job *job, uint32_t q)
{
	struct probe_way *way = &job->ways[q];
	uint64_t total = probe_requests(&job->shape, q);
	while (way->next < total && way->next - way->freed < job->link->depth) {
		if (probe_message_of(&job->shape, q, way->next) >= job->allowed) break;
		struct probe_piece piece = probe_piece_of(&job->shape, q, way->next);
		struct ibv_sge sge = { .addr = (uint64_t)(uintptr_t)job->memory->ptr + job->out_at + piece.offset, .length = (uint32_t)piece.bytes,
			.lkey = job->memory->mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .wr_id = wr_id(false, q, way->next + 1) }, *bad;
		bool told = piece.last && job->notice;
		if (told) wr.imm_data = htonl(immediate_of(job, q));
		wr.opcode = job->op == PROBE_READ ? IBV_WR_RDMA_READ : job->op == PROBE_SEND ? (told ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND)
			: told ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
		wr.wr.rdma.remote_addr = job->remote_addr + piece.offset;
		wr.wr.rdma.rkey = job->remote_rkey;
		/* One completion tells of all before it; the last, and one before the queue is full, must have one. */
		if (way->next + 1 == total || (job->us && piece.last) || (way->next + 1) % TP_MIN(SIGNAL_EVERY, job->link->depth) == 0) wr.send_flags = IBV_SEND_SIGNALED;
		int error = ibv_post_send(job->link->qps[q], &wr, &bad);
		if (error) return probe_fail("%s: a %s of %llu bytes can't be posted: %s", job->link->port->ib->text, probe_op_name((int)job->op),
			(unsigned long long)piece.bytes, strerror(error));
		way->next++;
	}
	return 0;
}

static int take(struct probe_job *job, const struct ibv_wc *wc)
{
	bool in = wc->wr_id >> 63;
	uint32_t q = (uint32_t)(wc->wr_id >> 48) & 0x7fff;
	struct probe_way *way = &job->ways[q];
	if (wc->status != IBV_WC_SUCCESS) return probe_link_failed(job->link, wc, in ? "a receive" : probe_op_name((int)job->op));
	if (!in) {
		uint64_t freed = wc->wr_id & 0xffffffffffff;
		job->left_out -= freed - way->freed;
		way->freed = freed;
		return 0;
	}
	way->in++;
	job->left_in--;
	if (wc->wc_flags & IBV_WC_WITH_IMM) job->imm += ntohl(wc->imm_data);
	return post_receives(job, q);
}

/* Posts, polls, takes; now and then yields and looks at the peer. */
static int advance(struct probe_job *job)
{
	struct ibv_wc wcs[16];
	int status = 0;
	for (uint32_t q = 0; q < job->shape.nqps && job->left_out > 0 && !status; q++) status = post_requests(job, q);
	if (status) return status;
	int n = ibv_poll_cq(job->link->cq, TP_ARRAY_LEN(wcs), wcs);
	if (n < 0) return probe_fail("%s: its completion queue can't be polled", job->link->port->ib->text);
	for (int i = 0; i < n && !status; i++) status = take(job, &wcs[i]);
	if (n > 0) job->idle = 0;
	if (n > 0 || ++job->idle % YIELD_EVERY != 0) return status;
	/* The other end may need this processor, and the card's own thread too. */
	sched_yield();
	uint64_t now = tp_clock_ns();
	if (!job->peer || now - job->looked < LOOK_NS) return 0;
	job->looked = now;
	return probe_look(job->peer);
}

static int run_one_by_one(struct probe_job *job)
{
	for (uint32_t i = 0; i < job->shape.count; i++) {
		uint64_t after = job->left_out - probe_pieces(&job->shape);
		uint64_t start = tp_clock_ns();
		job->allowed = i + 1;
		while (job->left_out > after) {
			int status = advance(job);
			if (status) return status;
		}
		job->us[i] = (double)(tp_clock_ns() - start) / 1000;
	}
	return 0;
}

int probe_job_run(struct probe_job *job)
{
	uint64_t start = job->looked = tp_clock_ns();
	bool sending = job->left_out > 0;
	if (sending && job->us) {
		int status = run_one_by_one(job);
		if (status) return status;
		job->ns = tp_clock_ns() - start;
		sending = false;
	}
	while (job->left_out > 0 || job->left_in > 0) {
		int status = advance(job);
		if (status) return status;
		if (!sending || job->left_out > 0) continue;
		job->ns = tp_clock_ns() - start;
		sending = false;
	}
	return 0;
}

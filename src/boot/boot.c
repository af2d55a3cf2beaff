/* A rank's way in and out, and what it sees of its communicator. */
#include "boot/internal.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { P_INIT_TIMEOUT };
static struct tp_param boot_params[] = {
	[P_INIT_TIMEOUT] = { .name = "TELPHER_INIT_TIMEOUT", .kind = TP_PARAM_INT, .fallback = "1800", .min = 1, .max = 1000000,
		.doc = "seconds that a communicator's ranks wait for each other at init" },
};
TP_PARAM_TABLE("boot", boot_params)

static ncclResult_t check_args(const struct tp_boot_args *args)
{
	if (args->nranks < 1 || args->rank < 0 || args->rank >= args->nranks)
		return TP_FAIL(ncclInvalidArgument, "rank %d of %d: there is no such rank", args->rank, args->nranks);
	if (args->nids < 1 || args->nids > args->nranks || !args->ids)
		return TP_FAIL(ncclInvalidArgument, "rank %d: %d unique ids for %d ranks, expected 1 to %d", args->rank, args->nids, args->nranks, args->nranks);
	return ncclSuccess;
}

static ncclResult_t fill_joiner(const struct tp_boot_args *args, struct tp_joiner *joiner)
{
	struct tp_wire_join *join = &joiner->join;
	int64_t timeout = args->timeout_ms > 0 ? args->timeout_ms : tp_param_int(&boot_params[P_INIT_TIMEOUT]) * 1000;
	join->protocol = TP_WIRE_PROTOCOL;
	join->library = TP_WIRE_LIBRARY;
	join->rank = args->rank;
	join->nranks = args->nranks;
	join->nids = args->nids;
	join->group = (int32_t)((int64_t)args->rank * args->nids / args->nranks);
	join->device = args->device;
	join->timeout_ms = (int32_t)TP_MIN(timeout, INT32_MAX);
	join->host_hash = tp_host_hash();
	strncpy(join->host_name, tp_host_name(), sizeof(join->host_name) - 1);
	TP_TRY(tp_id_parse(&args->ids[join->group], &joiner->id));
	TP_TRY(tp_id_parse(&args->ids[0], &joiner->first));
	if (join->group > 0 && joiner->first.name == joiner->id.name)
		return TP_FAIL(ncclInvalidArgument, "rank %d: unique ids 0 and %d are the same", args->rank, join->group);
	tp_wire_addr_put(&join->first, &joiner->first.root);
	memcpy(join->first_secret, joiner->first.secret, sizeof(join->first_secret));
	joiner->deadline_ms = tp_clock_ms() + (uint64_t)join->timeout_ms;
	return ncclSuccess;
}

/* Before the rank says that it is there, the life signs of the host it watches must flow: from then on a death is told from
 * a departure. */
static ncclResult_t wait_settled(struct tp_joiner *joiner, struct tp_site *site, _Atomic uint32_t *abort)
{
	ncclResult_t result = ncclSuccess;
	tp_service_lock();
	while (result == ncclSuccess && !tp_mesh_is_settled(site) && joiner->result == ncclSuccess) {
		uint64_t now = tp_clock_ms();
		if (abort && atomic_load_explicit(abort, memory_order_relaxed)) result = TP_FAIL(ncclInternalError, "rank %d: init was aborted", joiner->join.rank);
		else if (now > joiner->deadline_ms) result = TP_FAIL(ncclRemoteError, "rank %d: time is over: the next host does not answer", joiner->join.rank);
		else tp_service_wait(&site->cond, now + TP_BOOT_SLICE_MS);
	}
	tp_service_unlock();
	return result;
}

static void fill_boot(struct tp_boot_inside *b, const struct tp_joiner *joiner, struct tp_site *site, _Atomic uint32_t *abort)
{
	struct tp_segment *seg = site->seg;
	struct tp_boot *boot = &b->boot;
	boot->rank = joiner->join.rank;
	boot->nranks = seg->nranks;
	boot->host = seg->host;
	boot->nhosts = seg->nhosts;
	boot->peers = tp_segment_peers(seg);
	boot->local = boot->peers[boot->rank].local;
	boot->nlocal = seg->nlocal;
	boot->local_ranks = tp_segment_local_ranks(seg);
	boot->comm_hash = site->name;
	memcpy(boot->secret, site->secret, sizeof(boot->secret));
	boot->bells = tp_segment_bells(seg);
	boot->alarm = &seg->alarm;
	boot->abort = abort ? abort : &b->never;
	tp_service_lock();
	site->settled = true;
	tp_service_unlock();
	b->site = site;
	b->generation = tp_service.generation;
}

ncclResult_t tp_boot_open(const struct tp_boot_args *args, struct tp_boot **out)
{
	struct tp_joiner joiner = {0};
	struct tp_site *site = NULL;
	uint64_t begin = tp_clock_ns(), started_ns = 0, seated = 0, attached = 0;
	TP_TRY(check_args(args));
	TP_TRY(fill_joiner(args, &joiner));
	struct tp_boot_inside *b = tp_alloc(1, sizeof(*b), "communicator's bootstrap");
	if (!b) return ncclSystemError;
	tp_service_init_cond(&joiner.cond);
	ncclResult_t result = tp_join_start(&joiner);
	bool started = result == ncclSuccess;
	started_ns = tp_clock_ns();
	if (result == ncclSuccess) result = tp_join_wait(&joiner, &joiner.seated, args->abort);
	seated = tp_clock_ns();
	if (result == ncclSuccess) result = tp_site_open(&joiner, args->abort, &site);
	if (result == ncclSuccess && joiner.table) tp_join_tell(&joiner, TP_FRAME_READY);
	if (result == ncclSuccess) result = wait_settled(&joiner, site, args->abort);
	if (result == ncclSuccess) tp_join_tell(&joiner, TP_FRAME_DONE);
	attached = tp_clock_ns();
	if (result == ncclSuccess) result = tp_join_wait(&joiner, &joiner.go, args->abort);
	if (result == ncclSuccess) fill_boot(b, &joiner, site, args->abort);
	if (started) tp_join_end(&joiner);
	pthread_cond_destroy(&joiner.cond);
	memset(&joiner.id, 0, sizeof(joiner.id));
	if (result != ncclSuccess) {
		if (site) tp_site_close(site);
		free(b);
		return result;
	}
	uint64_t end = tp_clock_ns();
	/* send: until the root has our join; recv: until it has all; ring: our host's segment and neighbours; delay: the others'. */
	uint64_t sent = TP_MAX(joiner.sent_ns, started_ns);
	TP_INFO(TP_INIT | TP_BOOTSTRAP, "Bootstrap timings total %.6f (create %.6f, send %.6f, recv %.6f, ring %.6f, delay %.6f)",
		(double)(end - begin) * 1e-9, (double)(started_ns - begin) * 1e-9, (double)(sent - started_ns) * 1e-9, (double)(seated - sent) * 1e-9,
		(double)(attached - seated) * 1e-9, (double)(end - attached) * 1e-9);
	*out = &b->boot;
	return ncclSuccess;
}

void tp_boot_post_event(struct tp_boot *boot, const struct tp_event *event)
{
	struct tp_boot_inside *b = (struct tp_boot_inside *)boot;
	tp_service_lock();
	if (b->generation == tp_service.generation) tp_event_post(b->site, event);
	tp_service_unlock();
}

bool tp_boot_first_event(struct tp_boot *boot, struct tp_event *out)
{
	struct tp_boot_inside *b = (struct tp_boot_inside *)boot;
	return tp_event_get(b->site->seg, out);
}

/* A rank that closes while an event is out has not left in good order: its process may end before the news has reached the
 * other hosts, and then its death must tell them. */
static void mark_left(struct tp_boot_inside *b)
{
	struct tp_segment *seg = b->site->seg;
	struct tp_segment_rank *rank = &tp_segment_ranks(seg)[b->boot.local];
	struct tp_segment_proc *proc = &tp_segment_procs(seg)[rank->proc];
	struct tp_event event;
	if (tp_event_get(seg, &event)) return;
	atomic_store_explicit(&rank->left, 1, memory_order_release);
	if (atomic_fetch_add_explicit(&proc->left, 1, memory_order_acq_rel) + 1 == (uint32_t)proc->nranks)
		atomic_store_explicit(&proc->state, TP_PROC_LEFT, memory_order_release);    /* pairs with the watcher's acquire */
}

void tp_boot_close(struct tp_boot *boot)
{
	struct tp_boot_inside *b = (struct tp_boot_inside *)boot;
	if (!boot) return;
	tp_service_lock();
	bool mine = b->generation == tp_service.generation;
	if (mine) mark_left(b);
	tp_service_unlock();
	if (mine) tp_site_close(b->site);
	memset(b->boot.secret, 0, sizeof(b->boot.secret));
	free(b);
}

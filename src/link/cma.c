/* References into another process: a chunk is read with process_vm_readv from where it lies, one copy instead of two.
 *
 * Whether that is allowed depends on user ids, Yama, seccomp filters and containers, so it is tried rather than guessed:
 * every rank reads a random word from a neighbour, and references are used where all ranks of the communicator could. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "link/internal.h"

struct cma_card { uint64_t nonce, addr; };
struct cma_verdict { int32_t works; char why[96]; };

/* Yama's scope 1 lets only ancestors in unless a process says otherwise. */
static void admit_readers(void)
{
	FILE *scope = fopen("/proc/sys/kernel/yama/ptrace_scope", "re");
	if (!scope) return;
	int value = fgetc(scope);
	fclose(scope);
	if (value == '1') prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

ncclResult_t tp_link_read(const struct tp_link *link, void *dst, uint64_t addr, size_t bytes)
{
	size_t got = 0;
	while (got < bytes) {
		struct iovec local = { (char *)dst + got, bytes - got };
		struct iovec remote = { (void *)(uintptr_t)(addr + got), bytes - got };
		ssize_t n = process_vm_readv(link->peer_pid, &local, 1, &remote, 1, 0);
		if (n > 0) {
			got += (size_t)n;
			continue;
		}
		int error = n < 0 ? errno : EFAULT;
		if (error == EINTR || error == EAGAIN) continue;
		if (error == ESRCH)
			return TP_FAIL(ncclRemoteError, "rank %d (pid %d) is gone: its process ended while %zu bytes of its memory were to be read",
				link->peer, (int)link->peer_pid, bytes);
		if (error == EFAULT)
			return TP_FAIL(ncclInvalidArgument, "reading %zu bytes at 0x%llx of rank %d (pid %d) failed after %zu bytes: %s; that "
				"buffer, or the one here at %p, isn't ordinary mapped memory of the size that the call said", bytes,
				(unsigned long long)addr, link->peer, (int)link->peer_pid, got, strerror(error), dst);
		return TP_FAIL(ncclSystemError, "reading %zu bytes of rank %d (pid %d) with process_vm_readv failed: %s; TELPHER_CMA=0 copies "
			"through shared memory instead", bytes, link->peer, (int)link->peer_pid, strerror(error));
	}
	return ncclSuccess;
}

/* The next rank of this host that lives in another process; -1: none. */
static int find_neighbour(const struct tp_boot *boot)
{
	const struct tp_boot_peer *self = &boot->peers[boot->rank];
	for (int i = 1; i < boot->nlocal; i++) {
		int rank = boot->local_ranks[(boot->local + i) % boot->nlocal];
		if (boot->peers[rank].process_hash != self->process_hash) return rank;
	}
	return -1;
}

static void try_neighbour(const struct tp_boot *boot, const struct cma_card *cards, struct cma_verdict *out)
{
	int rank = find_neighbour(boot);
	out->works = 1;
	if (rank < 0) return;
	uint64_t seen = 0;
	struct iovec local = { &seen, sizeof(seen) }, remote = { (void *)(uintptr_t)cards[rank].addr, sizeof(seen) };
	ssize_t n = process_vm_readv(boot->peers[rank].pid, &local, 1, &remote, 1, 0);
	if (n == (ssize_t)sizeof(seen) && seen == cards[rank].nonce) return;
	out->works = 0;
	if (n < 0)
		snprintf(out->why, sizeof(out->why), "rank %d can't read rank %d: %s", boot->rank, rank, strerror(errno));
	else
		snprintf(out->why, sizeof(out->why), "rank %d read something else than rank %d's memory", boot->rank, rank);
}

ncclResult_t tp_cma_agree(struct tp_boot *boot, bool wanted, struct tp_cma *out)
{
	*out = (struct tp_cma){ .works = false };
	if (!wanted) {
		snprintf(out->why, sizeof(out->why), "it is switched off");
		return ncclSuccess;
	}
	struct cma_card *cards = tp_alloc(boot->nranks, sizeof(*cards), "references between ranks");
	struct cma_verdict *verdicts = tp_alloc(boot->nranks, sizeof(*verdicts), "references between ranks");
	ncclResult_t result = cards && verdicts ? ncclSuccess : ncclSystemError;
	/* Static, so that the word is still there when a slow neighbour reads it; ranks as threads write the same one. */
	static _Atomic uint64_t nonce;
	if (result != ncclSuccess) goto free_both;
	if (!atomic_load_explicit(&nonce, memory_order_acquire)) {
		uint64_t fresh, empty = 0;
		tp_secret_random(&fresh, sizeof(fresh));
		atomic_compare_exchange_strong_explicit(&nonce, &empty, fresh | 1, memory_order_acq_rel, memory_order_acquire);
	}
	admit_readers();
	cards[boot->rank] = (struct cma_card){ atomic_load_explicit(&nonce, memory_order_acquire), (uintptr_t)&nonce };
	result = tp_boot_all_gather(boot, cards, sizeof(*cards));
	if (result != ncclSuccess) goto free_both;
	try_neighbour(boot, cards, &verdicts[boot->rank]);
	result = tp_boot_all_gather(boot, verdicts, sizeof(*verdicts));
	if (result != ncclSuccess) goto free_both;
	out->works = true;
	for (int r = 0; r < boot->nranks && out->works; r++) {
		if (verdicts[r].works) continue;
		out->works = false;
		snprintf(out->why, sizeof(out->why), "%.*s", (int)sizeof(verdicts[r].why) - 1, verdicts[r].why);
	}
free_both:
	free(cards);
	free(verdicts);
	return result;
}

/* What peers say of their registrations, and of ours; on the service thread, which mustn't wait for kernels: it hears of deaths, which end them. */
#include <stdlib.h>

#include "mem/internal.h"

/* A peer's buffer that kernels keep mapped: CUDA would wait for them. */
struct tp_mem_late { struct tp_mem_late *next; struct tp_mem_import *import; int from; uint32_t index, generation; bool answers; };

static bool drop(struct tp_mem *mem, struct tp_mem_import *import)
{
	bool hushes = tp_mem_import_waits(import) && mem->kernels.hush;
	if (hushes && !mem->kernels.hush(mem->kernels.rank)) return false;
	tp_mem_import_drop(import);
	if (hushes) mem->kernels.hush_end(mem->kernels.rank);
	return true;
}

static void let_go(struct tp_mem *mem, struct tp_mem_late what)
{
	bool dropped = drop(mem, what.import);
	struct tp_mem_late *late = dropped ? NULL : tp_alloc(1, sizeof(*late), "a peer's buffer that is still mapped");
	if (late) {
		*late = what;
		late->next = mem->late;
		mem->late = late;
		tp_mem_poll_soon(mem);
	} else if (!dropped) {
		tp_mem_import_drop(what.import);
		dropped = true;
	}
	if (what.answers) tp_mem_answer(mem, what.from, what.index, what.generation, dropped ? TP_MEM_LET_GO : TP_MEM_LATER);
}

void tp_mem_peer_announced(struct tp_mem *mem, int from, uint32_t index, uint32_t generation, const struct tp_mem_record *record, int fd)
{
	struct tp_mem_import *import = NULL, *old;
	uint64_t address = 0;
	bool mapped = tp_mem_import_take(mem->gpu, mem->process, record, fd, &address, &import) == ncclSuccess;
	pthread_mutex_lock(&mem->lock);
	struct tp_mem_remote *remote = &mem->remotes[from][index];
	old = remote->import;
	*remote = (struct tp_mem_remote){ import, generation };
	if (tp_mem_write_words(mem, (size_t)from * TP_MEM_BUFFERS + index, &address, 1) != ncclSuccess) mapped = false;
	pthread_mutex_unlock(&mem->lock);
	if (old) let_go(mem, (struct tp_mem_late){ .import = old });
	tp_mem_answer(mem, from, index, generation, mapped ? TP_MEM_MAPPED : TP_MEM_NOT_MAPPED);
}

void tp_mem_peer_retired(struct tp_mem *mem, int from, uint32_t index, uint32_t generation)
{
	struct tp_mem_import *import = NULL;
	uint64_t nothing = 0;
	pthread_mutex_lock(&mem->lock);
	struct tp_mem_remote *remote = &mem->remotes[from][index];
	if (remote->generation == generation) {
		import = remote->import;
		remote->import = NULL;
		(void)tp_mem_write_words(mem, (size_t)from * TP_MEM_BUFFERS + index, &nothing, 1);
	}
	pthread_mutex_unlock(&mem->lock);
	let_go(mem, (struct tp_mem_late){ NULL, import, from, index, generation, true });
}

static bool drop_late(struct tp_mem *mem)
{
	for (struct tp_mem_late **at = &mem->late; *at;) {
		struct tp_mem_late *late = *at;
		if (!drop(mem, late->import)) {
			at = &late->next;
			continue;
		}
		*at = late->next;
		if (late->answers) tp_mem_answer(mem, late->from, late->index, late->generation, TP_MEM_LET_GO);
		free(late);
	}
	return mem->late != NULL;
}

bool tp_mem_settle(struct tp_mem *mem)
{
	bool left = tp_mem_retire_passed(mem);
	return drop_late(mem) || left;
}

void tp_mem_peers_close(struct tp_mem *mem)
{
	while (mem->late) {
		struct tp_mem_late *late = mem->late;
		mem->late = late->next;
		tp_mem_import_drop(late->import);
		free(late);
	}
	for (int l = 0; mem->remotes && l < mem->boot->nlocal; l++)
		for (int i = 0; i < TP_MEM_BUFFERS; i++) tp_mem_import_drop(mem->remotes[l][i].import);
}

/* ---- of ours */

void tp_mem_peer_answered(struct tp_mem *mem, int from, uint32_t index, uint32_t generation, enum tp_mem_reply reply)
{
	const uint64_t bit = 1ull << from;
	const bool ends = reply == TP_MEM_LET_GO || reply == TP_MEM_LATER;
	pthread_mutex_lock(&mem->lock);
	struct tp_mem_range *range = mem->by_index[index];
	/* An answer to what was said before is none. */
	if (range && range->generation == generation && (range->retiring == ends || reply == TP_MEM_GONE)) {
		range->answers |= bit;
		if (reply == TP_MEM_MAPPED || reply == TP_MEM_LET_GO || (reply == TP_MEM_GONE && range->retiring)) range->acks |= bit;
		if (reply == TP_MEM_NOT_MAPPED)
			TP_INFO(TP_REG, "rank %d can't map a buffer that rank %d registered: it is used without", mem->boot->local_ranks[from], mem->boot->rank);
		if (reply == TP_MEM_MAPPED && range->acks == mem->everybody && !range->ended && tp_mem_write_own(mem, index, range->begin) == ncclSuccess)
			TP_INFO(TP_REG, "rank %d: what it registered at %p is mapped by all ranks of the host", mem->boot->rank, (void *)range->begin);
		if (range->retiring && range->acks == mem->everybody) tp_mem_forget_range(mem, range);
		pthread_cond_broadcast(&mem->answered);
	}
	pthread_mutex_unlock(&mem->lock);
}

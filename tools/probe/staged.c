/* Data through host memory; see staged.h. */
#include "probe/staged.h"

#include <string.h>

#define SEED 0x70726f6265u

int probe_copy(const struct tp_gpu *gpu, void *to, const void *from, size_t bytes)
{
	if (!gpu) {
		memcpy(to, from, bytes);
		return 0;
	}
	return tp_gpu_copy(gpu, to, from, bytes) == ncclSuccess ? 0 : probe_fail_below(NULL);
}

int probe_staged_open(const struct probe_port *port, const struct tp_gpu *gpu, size_t bytes, int numa, struct probe_staged *out)
{
	enum probe_kind data = gpu ? PROBE_GPU : PROBE_HUGE, stage = gpu ? PROBE_PINNED : PROBE_HUGE;
	memset(out, 0, sizeof(*out));
	out->gpu = gpu;
	int status = probe_alloc(data, gpu, bytes, numa, &out->from);
	if (!status) status = probe_alloc(data, gpu, bytes, numa, &out->to);
	if (!status) status = probe_alloc(stage, gpu, bytes, numa, &out->out);
	if (!status) status = probe_alloc(stage, gpu, bytes, numa, &out->in);
	if (!status) status = probe_register(port, &out->out, false);
	if (!status) status = probe_register(port, &out->in, false);
	if (!status) status = probe_loop_open(port, &out->out, &out->in, &out->loop);
	if (!status) status = probe_fill(&out->from, 0, bytes, SEED);
	if (status) probe_staged_close(out);
	return status;
}

void probe_staged_close(struct probe_staged *staged)
{
	probe_loop_close(&staged->loop);
	struct probe_memory *all[] = { &staged->from, &staged->to, &staged->out, &staged->in };
	for (size_t i = 0; i < TP_ARRAY_LEN(all); i++)
		if (all[i]->ptr) probe_free(all[i]);
}

int probe_staged_move(struct probe_staged *s, size_t bytes, size_t chunk)
{
	int status = 0;
	for (size_t at = 0; at < bytes && !status; at += chunk) {
		size_t n = TP_MIN(chunk, bytes - at);
		status = probe_copy(s->gpu, (char *)s->out.ptr + at, (char *)s->from.ptr + at, n);
		if (!status) status = probe_loop_write(&s->loop, at, n);
		if (!status) status = probe_copy(s->gpu, (char *)s->to.ptr + at, (char *)s->in.ptr + at, n);
	}
	return status;
}

int probe_staged_check(struct probe_staged *s, size_t bytes)
{
	char text[160];
	bool ok = false;
	int status = probe_verify(&s->to, 0, bytes, SEED, &ok, text, sizeof(text));
	if (status || ok) return status;
	return probe_fail("what arrived isn't what was sent: %s", text);
}

/* Everything that reads bytes from the network before or after the proof: greetings, frames' heads, joins, tables, ids. */
#include <string.h>
#include <stdlib.h>
#include "boot/internal.h"

static void fuzz_table(const uint8_t *data, size_t size)
{
	struct tp_segment plan;
	struct tp_wire_table head;
	if (size < sizeof(head)) return;
	memcpy(&head, data, sizeof(head));
	if (head.nranks < 1 || head.nranks > 1000 || tp_wire_table_check(data, size, head.nranks)) return;
	/* What is said to be right must be usable. */
	for (int host = 0; host < head.nhosts; host++) {
		size_t bytes = tp_segment_plan(data, host, &plan);
		void *memory = bytes ? aligned_alloc(4096, tp_align_up(bytes, 4096)) : NULL;
		if (!memory) abort();
		memset(memory, 0, plan.gather);
		tp_segment_fill(memory, &plan, data);
		free(memory);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint8_t key[TP_SECRET_BYTES] = { 1 };
	char text[160];
	struct tp_wire_frame frame;
	struct tp_wire_join join;
	struct tp_id id;
	if (size < 1) return 0;
	int what = data[0] % 5;
	data++;
	size--;
	switch (what) {
	case 0: tp_wire_hello_check(data, size, text, sizeof(text)); break;
	case 1:
		if (size < sizeof(frame)) break;
		memcpy(&frame, data, sizeof(frame));
		if (tp_wire_frame_check(&frame, frame.number, size - sizeof(frame)) == NULL)
			tp_wire_frame_proven(&frame, key, data + sizeof(frame));
		break;
	case 2:
		memset(&join, 0, sizeof(join));
		memcpy(&join, data, TP_MIN(size, sizeof(join)));
		if (tp_wire_join_check(&join, size) == NULL && (strlen(join.host_name) > 63 || join.rank >= join.nranks)) abort();
		break;
	case 3: fuzz_table(data, size); break;
	case 4:
		if (size < sizeof(ncclUniqueId)) break;
		ncclUniqueId raw;
		memcpy(&raw, data, sizeof(raw));
		tp_id_parse(&raw, &id);
		break;
	}
	return 0;
}

/* Registered memory of the host and of GPUs, the same to tests of the card whichever it is. */
#ifndef TP_TESTS_VERBS_HELPER_API_GPU_PLACES_H
#define TP_TESTS_VERBS_HELPER_API_GPU_PLACES_H

#include "verbs/helper_api.h"

#define PLACE_BYTES ((uint32_t)2 << 20)
#define PLACE_SPARE 64u

struct place { uint8_t *data; struct ibv_mr *mr; int device; };         /* device -1: the host's */
extern uint8_t place_pattern[PLACE_BYTES], place_found[PLACE_BYTES];
extern const struct pair_options place_patient;

struct place place_open(struct side *side, int device);
void place_close(struct place *p);
void place_put(const struct place *p, uint32_t offset, const void *from, size_t bytes);
void place_get(void *to, const struct place *p, uint32_t offset, size_t bytes);
void place_make_pattern(uint32_t bytes, uint32_t seed);
/* A place that holds the pattern and another with something else in it, for messages of so many bytes near their beginning. */
void place_prepare(const struct place *from, const struct place *to, uint32_t bytes, uint32_t seed);
/* bytes from the pattern's offset lie at to, and nothing else around them. */
void place_expect(const struct place *to, uint32_t at, uint32_t offset, uint32_t bytes);
int place_send(struct side *side, enum ibv_wr_opcode opcode, const struct place *local, uint32_t offset, uint32_t bytes, const struct place *remote, uint32_t at,
	unsigned flags);
void place_receive(struct side *side, const struct place *place, uint32_t offset, uint32_t bytes);
struct ibv_wc place_expect_ok(struct side *side);

#endif

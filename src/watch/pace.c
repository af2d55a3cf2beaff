/* The pace of a communicator: is it as fast as the cost model says?
 *
 * Each rank keeps, of its last operations, how many times as long as predicted they took. What a rank measures holds its wait for ranks that
 * came late, which is no fault of any path. But whoever came last waited for nobody, so of one operation the least of all ranks' times is what
 * moving the data took. So now and then ranks compare their windows, and what they judge is the least of each operation: they all judge the
 * same numbers, and come to the same verdict. When it is time to compare depends on counts alone, which are equal everywhere.
 *
 * One slow window is chance (a backup, another job). Several in a row, two at least, that took some seconds are a reason to look at the pairs; a
 * look that finds nothing makes the next one rarer. */
#include <stdlib.h>
#include <string.h>
#include "watch/internal.h"

#define MOST 512                        /* operations until windows are compared, where all is well */
#define SLOW_WINDOWS 2
#define MOST_SKIPPED 256

void tp_pace_begin(struct tp_pace *pace, uint32_t first, float seconds)
{
	*pace = (struct tp_pace){ .first = first, .wanted = first, .wanted_s = seconds, .patience = 1 };
}

bool tp_pace_add(struct tp_pace *pace, double took_us, double predicted_us)
{
	double ratio = predicted_us > 0 ? took_us / predicted_us : 1;
	pace->ratio[pace->count++ % TP_PACE_SAMPLES] = (float)TP_MIN(TP_MAX(ratio, 1e-6), 1e6);
	if (pace->count < pace->wanted) return false;
	if (!pace->skipped) return true;
	pace->skipped--;
	pace->count = 0;
	return false;
}

static uint32_t window_size(const struct tp_pace *pace) { return TP_MIN(pace->count, (uint32_t)TP_PACE_SAMPLES); }

void tp_pace_window(const struct tp_pace *pace, float out[TP_PACE_SAMPLES])
{
	memset(out, 0, TP_PACE_SAMPLES * sizeof(*out));
	memcpy(out, pace->ratio, window_size(pace) * sizeof(*out));
}

static bool is_slow(const struct tp_pace *pace, const float *ratios)
{
	uint32_t size = window_size(pace), slow = 0;
	for (uint32_t i = 0; i < size; i++) slow += ratios[i] > TP_PACE_SLOW_RATIO;
	return slow > 0 && slow * 4 >= size * 3;
}

static bool for_long(const struct tp_pace *pace, uint32_t windows, float seconds) { return windows >= SLOW_WINDOWS && seconds >= pace->wanted_s; }

bool tp_pace_may_suspect(const struct tp_pace *pace, float elapsed_s)
{
	return is_slow(pace, pace->ratio) && for_long(pace, pace->slow + 1, pace->slow_s + elapsed_s);
}

static int compare(const void *left, const void *right)
{
	const float *a = left, *b = right;
	return (*a > *b) - (*a < *b);
}

bool tp_pace_judge(struct tp_pace *pace, const float least[TP_PACE_SAMPLES], float elapsed_s, float *median)
{
	float sorted[TP_PACE_SAMPLES];
	uint32_t size = window_size(pace);
	memcpy(sorted, least, sizeof(sorted));
	qsort(sorted, size, sizeof(*sorted), compare);
	*median = size ? sorted[size / 2] : 0;
	bool slow = is_slow(pace, least);
	pace->slow = slow ? pace->slow + 1 : 0;
	pace->slow_s = slow ? pace->slow_s + elapsed_s : 0;
	pace->wanted = slow ? pace->first : TP_MIN(pace->wanted * 2, (uint32_t)MOST);
	pace->count = 0;
	return for_long(pace, pace->slow, pace->slow_s);
}

void tp_pace_begin_anew(struct tp_pace *pace)
{
	pace->slow = 0;
	pace->slow_s = 0;
}

void tp_pace_put_off(struct tp_pace *pace)
{
	tp_pace_begin_anew(pace);
	pace->skipped = pace->patience;
	pace->patience = TP_MIN(pace->patience * 4, (uint32_t)MOST_SKIPPED);
}

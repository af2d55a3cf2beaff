#include "digits.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int parse_line(char *line, struct digit *out)
{
	char *at = line, *end;
	for (int i = 0; i <= PIXELS; i++) {
		long value = strtol(at, &end, 10);
		if (end == at || value < 0 || value > (i < PIXELS ? 16 : CLASSES - 1)) return -1;
		if (*end != (i < PIXELS ? ',' : '\n') && *end != 0) return -1;
		if (i < PIXELS) out->pixels[i] = (float)value / 16;
		else out->label = (int)value;
		at = end + 1;
	}
	return 0;
}

int digits_read(const char *path, struct digits *out)
{
	FILE *f = fopen(path, "r");
	if (!f) { fprintf(stderr, "digits: '%s' can't be read: %s\n", path, strerror(errno)); return -1; }
	char line[512];
	size_t room = 2048;
	out->count = 0;
	out->all = malloc(room * sizeof(*out->all));
	while (out->all && fgets(line, sizeof(line), f)) {
		if (out->count == room || parse_line(line, &out->all[out->count])) {
			fprintf(stderr, "digits: %s:%zu: not 64 pixels from 0 to 16 and a label from 0 to 9\n", path, out->count + 1);
			fclose(f);
			free(out->all);
			return -1;
		}
		out->count++;
	}
	fclose(f);
	if (!out->all || !out->count) { fprintf(stderr, "digits: '%s' holds no images\n", path); free(out->all); return -1; }
	return 0;
}

static unsigned next_random(unsigned *state)
{
	*state = *state * 1664525u + 1013904223u;
	return *state >> 8;
}

void digits_shuffle(struct digits *digits, unsigned seed)
{
	for (size_t i = digits->count - 1; i > 0; i--) {
		size_t j = next_random(&seed) % (i + 1);
		struct digit swap = digits->all[i];
		digits->all[i] = digits->all[j];
		digits->all[j] = swap;
	}
}

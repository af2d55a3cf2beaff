/* A rank's output stream: read as it comes, written line by line with the rank before each. */
#ifndef TELPHER_RUN_OUTPUT_H
#define TELPHER_RUN_OUTPUT_H

#include <stdio.h>

struct run_stream {
	int fd;                     /* -1: ended */
	FILE *to;
	char prefix[24];
	size_t used;
	char line[4096];            /* what has come of the current line; a longer line is written in parts */
};

void run_stream_open(struct run_stream *stream, int fd, FILE *to);
void run_stream_prefix(struct run_stream *stream, int rank, int nranks);
void run_stream_read(struct run_stream *stream);
void run_stream_close(struct run_stream *stream);

#endif

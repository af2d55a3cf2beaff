/* A rank's output stream: read as it comes, written line by line with the rank before each. A line of over a megabyte is written
 * in parts, each a line of its own. */
#ifndef TELPHER_RUN_OUTPUT_H
#define TELPHER_RUN_OUTPUT_H

#include <stdio.h>

struct run_stream {
	int fd;                     /* -1: ended */
	FILE *to;
	char prefix[24];
	char *line;                 /* what has come of the current line; grows with it */
	size_t used, capacity;
};

void run_stream_open(struct run_stream *stream, int fd, FILE *to);
void run_stream_prefix(struct run_stream *stream, int rank, int nranks);
/* Writes the whole lines of what has come. One read a call, so that no rank, however much it says, keeps others waiting. */
void run_stream_read(struct run_stream *stream);
/* Reads all that has come by now. */
void run_stream_drain(struct run_stream *stream);
/* Writes the rest, with a newline where it has none. */
void run_stream_close(struct run_stream *stream);

#endif

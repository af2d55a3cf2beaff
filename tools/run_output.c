#include "run_output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define READ_BYTES 4096
#define LONGEST_LINE (1u << 20)

void run_stream_open(struct run_stream *stream, int fd, FILE *to)
{
	memset(stream, 0, sizeof(*stream));
	stream->fd = fd;
	stream->to = to;
	fcntl(fd, F_SETFL, O_NONBLOCK);
}

void run_stream_prefix(struct run_stream *stream, int rank, int nranks)
{
	int width = snprintf(NULL, 0, "%d", nranks - 1);
	snprintf(stream->prefix, sizeof(stream->prefix), "[%*d] ", width, rank);
}

static void write_line(struct run_stream *stream, const char *text, size_t bytes, bool has_newline)
{
	fputs(stream->prefix, stream->to);
	fwrite(text, 1, bytes, stream->to);
	if (!has_newline) fputc('\n', stream->to);
}

static void write_part(struct run_stream *stream)
{
	if (stream->used) write_line(stream, stream->line, stream->used, false);
	stream->used = 0;
}

static void make_room(struct run_stream *stream)
{
	size_t capacity = stream->capacity ? 2 * stream->capacity : 2 * READ_BYTES;
	if (stream->capacity - stream->used >= READ_BYTES) return;
	char *grown = capacity <= LONGEST_LINE ? realloc(stream->line, capacity) : NULL;
	if (!grown && !stream->line) { fprintf(stderr, "telpher run: out of memory\n"); exit(1); }
	if (!grown) { write_part(stream); return; }
	stream->line = grown;
	stream->capacity = capacity;
}

void run_stream_read(struct run_stream *stream)
{
	make_room(stream);
	ssize_t got = read(stream->fd, stream->line + stream->used, stream->capacity - stream->used);
	if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
	if (got <= 0) { run_stream_close(stream); return; }
	char *start = stream->line, *fresh = start + stream->used, *end = fresh + got, *newline;
	while ((newline = memchr(fresh, '\n', (size_t)(end - fresh)))) {
		fresh = newline + 1;
		write_line(stream, start, (size_t)(fresh - start), true);
		start = fresh;
	}
	stream->used = (size_t)(end - start);
	memmove(stream->line, start, stream->used);
	fflush(stream->to);
}

void run_stream_drain(struct run_stream *stream)
{
	int there = 0;
	if (stream->fd < 0 || ioctl(stream->fd, FIONREAD, &there)) return;
	for (; there > 0 && stream->fd >= 0; there -= READ_BYTES) run_stream_read(stream);
}

void run_stream_close(struct run_stream *stream)
{
	if (stream->fd < 0) return;
	write_part(stream);
	fflush(stream->to);
	close(stream->fd);
	free(stream->line);
	stream->line = NULL;
	stream->capacity = 0;
	stream->fd = -1;
}

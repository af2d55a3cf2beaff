#include "run_output.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

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

static void write_line(struct run_stream *stream, const char *text, size_t bytes, int ended)
{
	fputs(stream->prefix, stream->to);
	fwrite(text, 1, bytes, stream->to);
	if (!ended) fputc('\n', stream->to);
}

void run_stream_read(struct run_stream *stream)
{
	for (;;) {
		ssize_t got = read(stream->fd, stream->line + stream->used, sizeof(stream->line) - stream->used);
		if (got < 0 && errno == EINTR) continue;
		if (got < 0 && errno == EAGAIN) break;
		if (got <= 0) { run_stream_close(stream); return; }
		stream->used += (size_t)got;
		char *start = stream->line, *newline;
		size_t left = stream->used;
		while ((newline = memchr(start, '\n', left))) {
			size_t bytes = (size_t)(newline - start) + 1;
			write_line(stream, start, bytes, 1);
			start += bytes;
			left -= bytes;
		}
		if (left == sizeof(stream->line)) { write_line(stream, start, left, 0); left = 0; }
		memmove(stream->line, start, left);
		stream->used = left;
	}
	fflush(stream->to);
}

void run_stream_close(struct run_stream *stream)
{
	if (stream->fd < 0) return;
	if (stream->used) write_line(stream, stream->line, stream->used, 0);
	stream->used = 0;
	fflush(stream->to);
	close(stream->fd);
	stream->fd = -1;
}

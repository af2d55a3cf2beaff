/* The capture file: pcapng, one interface of raw IP packets, times in nanoseconds (capture.h). Written by whoever sends or
 * receives, under one lock, buffered; the buffer is written out when it is full, at the end, and each 100 ms. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/fork.h"
#include "verbs/capture.h"
#include "verbs/engine.h"
#include "verbs/path.h"
#include "verbs/wire.h"

enum { LINK_RAW_IP = 101, FLUSH_NS = 100000000, UDP_BYTES = 8, V4_BYTES = 20, V6_BYTES = 40 };

static struct tp_param params[] = {
	{ .name = "TELPHER_VERBS_CAPTURE", .kind = TP_PARAM_STRING, .doc = "File (pcapng) that the wire's packets are written to; %p: the process's number" },
};
TP_PARAM_TABLE("verbs", params)

_Atomic bool tp_capture_running;
static FILE *file;
static uint64_t flushed_ns;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void write_header(FILE *out)
{
	struct { uint32_t type, length, magic; uint16_t major, minor; int64_t section; uint32_t again; } __attribute__((packed)) section = {
		0x0a0d0d0a, sizeof(section), 0x1a2b3c4d, 1, 0, -1, sizeof(section) };
	/* Option 9, if_tsresol: 9, nanoseconds. */
	struct { uint32_t type, length; uint16_t link, reserved; uint32_t snap; uint16_t option, bytes; uint8_t value[4]; uint32_t end, again; }
		__attribute__((packed)) interface = { 1, sizeof(interface), LINK_RAW_IP, 0, 0, 9, 1, { 9 }, 0, sizeof(interface) };
	fwrite(&section, sizeof(section), 1, out);
	fwrite(&interface, sizeof(interface), 1, out);
}

static void fork_child(void)
{
	/* The buffer is the parent's to write. */
	atomic_store_explicit(&tp_capture_running, false, memory_order_relaxed);
	file = NULL;
	pthread_mutex_init(&lock, NULL);
}
TP_FORK_HOOK(TP_FORK_BASE, NULL, NULL, fork_child)

/* path with %p replaced. */
static void expand(const char *path, char *out, size_t bytes)
{
	size_t used = 0;
	for (; *path && used + 12 < bytes; path++) {
		if (path[0] == '%' && path[1] == 'p') {
			used += (size_t)snprintf(out + used, bytes - used, "%d", (int)getpid());
			path++;
		} else {
			out[used++] = *path;
		}
	}
	out[used] = 0;
}

int tp_capture_start(const char *path)
{
	static bool end_watched;
	char name[4096];
	tp_capture_stop();
	expand(path, name, sizeof(name));
	FILE *out = fopen(name, "we");
	if (!out)
		return TP_CARD_FAIL(errno, "can't capture to %s: %s", name, strerror(errno));
	write_header(out);
	pthread_mutex_lock(&lock);
	if (!end_watched)
		atexit(tp_capture_stop);
	end_watched = true;
	file = out;
	pthread_mutex_unlock(&lock);
	atomic_store_explicit(&tp_capture_running, true, memory_order_relaxed);
	tp_path_watch();
	return 0;
}

void tp_capture_stop(void)
{
	atomic_store_explicit(&tp_capture_running, false, memory_order_relaxed);
	pthread_mutex_lock(&lock);
	if (file && fclose(file) != 0)
		TP_WARN("the capture is not whole: %s", strerror(errno));
	file = NULL;
	pthread_mutex_unlock(&lock);
	tp_path_watch();
}

void tp_capture_from_environment(void)
{
	const char *path = tp_param_string(&params[0]);
	if (path)
		tp_capture_start(path);
}

static void put16(uint8_t *at, size_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

static void put_checksum(uint8_t *header)
{
	uint32_t sum = 0;
	for (int i = 0; i < V4_BYTES; i += 2)
		sum += (uint32_t)header[i] << 8 | header[i + 1];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	put16(header + 10, ~sum & 0xffff);
}

/* The headers that the kernel writes; returns their length. The UDP checksum is left out (0), as RoCE does. */
static size_t make_headers(const struct tp_capture *packet, uint8_t *out)
{
	size_t udp_bytes = UDP_BYTES + packet->bytes, ip_bytes = V4_BYTES;
	if (packet->to.sa.sa_family == AF_INET6) {
		ip_bytes = V6_BYTES;
		memset(out, 0, ip_bytes);
		out[0] = (uint8_t)(0x60 | packet->tos >> 4);
		out[1] = (uint8_t)(packet->tos << 4);
		put16(out + 4, udp_bytes);
		out[6] = IPPROTO_UDP;
		out[7] = packet->ttl;
		memcpy(out + 8, &packet->from.v6.sin6_addr, 16);
		memcpy(out + 24, &packet->to.v6.sin6_addr, 16);
	} else {
		memset(out, 0, ip_bytes);
		out[0] = 0x45;
		out[1] = packet->tos;
		put16(out + 2, V4_BYTES + udp_bytes);
		put16(out + 4, packet->id);
		out[6] = 0x40;
		out[8] = packet->ttl;
		out[9] = IPPROTO_UDP;
		memcpy(out + 12, &packet->from.v4.sin_addr, 4);
		memcpy(out + 16, &packet->to.v4.sin_addr, 4);
		put_checksum(out);
	}
	uint8_t *udp = out + ip_bytes;
	memcpy(udp, &packet->from.v4.sin_port, 2);
	memcpy(udp + 2, &packet->to.v4.sin_port, 2);
	put16(udp + 4, udp_bytes);
	memset(udp + 6, 0, 2);
	return ip_bytes + UDP_BYTES;
}

void tp_capture_packet(const struct tp_capture *packet)
{
	static const uint8_t zeros[4];
	uint8_t headers[V6_BYTES + UDP_BYTES];
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	uint64_t ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
	size_t head = make_headers(packet, headers);
	uint32_t bytes = (uint32_t)head + packet->bytes, pad = -bytes & 3;
	/* Option 2, epb_flags: 1 in, 2 out. */
	struct { uint16_t option, bytes; uint32_t flags, end, length; } __attribute__((packed)) tail = { 2, 4, packet->out ? 2 : 1, 0, 0 };
	struct { uint32_t type, length, interface, high, low, captured, original; } block = { 6, 0, 0, (uint32_t)(ns >> 32), (uint32_t)ns, bytes, bytes };
	block.length = tail.length = (uint32_t)(sizeof(block) + bytes + pad + sizeof(tail));
	pthread_mutex_lock(&lock);
	if (file) {
		fwrite(&block, sizeof(block), 1, file);
		fwrite(headers, head, 1, file);
		fwrite(packet->data, packet->bytes, 1, file);
		fwrite(zeros, 1, pad, file);
		fwrite(&tail, sizeof(tail), 1, file);
		if (ns - flushed_ns > FLUSH_NS) {
			fflush(file);
			flushed_ns = ns;
		}
	}
	pthread_mutex_unlock(&lock);
}

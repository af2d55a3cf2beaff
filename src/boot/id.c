/* The unique id: who serves it and the secret that proves it. 128 bytes, our own form:
 *   0 magic (8), 8 version (2), 10 flags (2), 12 nothing (4), 16 root's address (24), 40 secret (32), 72 check (16), 88 zeros. */
#include "boot/internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { P_COMM_ID, P_JOB_SECRET, P_JOB_SECRET_FILE };
static struct tp_param id_params[] = {
	[P_COMM_ID] = { .name = "NCCL_COMM_ID", .kind = TP_PARAM_STRING, .doc = "address (host:port) at which rank 0 listens, in place of a unique id" },
	[P_JOB_SECRET] = { .name = "TELPHER_JOB_SECRET", .kind = TP_PARAM_STRING, .doc = "secret that proves who belongs to the job where NCCL_COMM_ID is used, alike on all ranks" },
	[P_JOB_SECRET_FILE] = { .name = "TELPHER_JOB_SECRET_FILE", .kind = TP_PARAM_STRING, .doc = "file that holds the job's secret, where TELPHER_JOB_SECRET isn't set" },
};
TP_PARAM_TABLE("boot", id_params)

struct wire_id {
	char magic[8];
	uint16_t version, flags;
	uint32_t zero;
	struct tp_wire_addr root;
	uint8_t secret[TP_SECRET_BYTES];
	uint8_t check[16];
	uint8_t rest[40];
} __attribute__((packed));
_Static_assert(sizeof(struct wire_id) == sizeof(ncclUniqueId), "an id has 128 bytes");

uint64_t tp_id_name(const uint8_t secret[TP_SECRET_BYTES])
{
	uint8_t mac[TP_SECRET_BYTES];
	uint64_t name;
	tp_secret_mac(secret, "name", 4, mac);
	memcpy(&name, mac, sizeof(name));
	return name;
}

static void id_check(const struct wire_id *id, uint8_t out[16])
{
	uint8_t mac[TP_SECRET_BYTES];
	tp_secret_mac(id->secret, id, offsetof(struct wire_id, check), mac);
	memcpy(out, mac, 16);
}

void tp_id_write(const struct tp_id *in, ncclUniqueId *out)
{
	struct wire_id id = { .magic = TP_ID_MAGIC, .version = TP_ID_VERSION, .flags = (uint16_t)in->flags };
	tp_wire_addr_put(&id.root, &in->root);
	memcpy(id.secret, in->secret, sizeof(id.secret));
	id_check(&id, id.check);
	memcpy(out, &id, sizeof(*out));
}

ncclResult_t tp_id_parse(const ncclUniqueId *in, struct tp_id *out)
{
	struct wire_id id;
	uint8_t check[16];
	memcpy(&id, in, sizeof(id));
	if (memcmp(id.magic, TP_ID_MAGIC, sizeof(id.magic)) != 0) {
		uint8_t zeros[sizeof(id)] = {0};
		return TP_FAIL(ncclInvalidArgument, "this is no unique id of Telpher (format %d): %s", TP_ID_VERSION,
			memcmp(in, zeros, sizeof(id)) == 0 ? "it is all zeros, was ncclGetUniqueId called and its result sent to this rank?"
			: "another library made it (the original NCCL 2.x?); all ranks must load the same libnccl.so.2");
	}
	if (id.version != TP_ID_VERSION)
		return TP_FAIL(ncclInvalidUsage, "the unique id has format %u of Telpher's ids, this library has format %d: all ranks must load the same version",
			id.version, TP_ID_VERSION);
	id_check(&id, check);
	if (memcmp(check, id.check, sizeof(check)) != 0 || !tp_wire_addr_get(&id.root, &out->root))
		return TP_FAIL(ncclInvalidArgument, "the unique id is damaged: its %zu bytes do not fit together; were all of them sent?", sizeof(id));
	out->flags = id.flags;
	memcpy(out->secret, id.secret, sizeof(out->secret));
	out->name = tp_id_name(id.secret);
	return ncclSuccess;
}

static ncclResult_t read_secret_file(const char *path, char *text, size_t room)
{
	struct stat st;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0) {
		int error = errno;
		if (fd >= 0) close(fd);
		return TP_FAIL(ncclSystemError, "TELPHER_JOB_SECRET_FILE=%s can't be read: %s", path, strerror(error));
	}
	ssize_t n = read(fd, text, room - 1);
	close(fd);
	if (n < 0) return TP_FAIL(ncclSystemError, "TELPHER_JOB_SECRET_FILE=%s can't be read: %s", path, strerror(errno));
	while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r')) n--;
	text[n] = 0;
	if (st.st_mode & (S_IRGRP | S_IROTH)) TP_WARN("TELPHER_JOB_SECRET_FILE=%s can be read by others (mode %03o); chmod 600 it", path, st.st_mode & 0777);
	return ncclSuccess;
}

/* The secret of an id that only an address stands for: the job's, bound to the address. */
static ncclResult_t job_secret(const union tp_addr *addr, uint8_t out[TP_SECRET_BYTES])
{
	static _Atomic bool warned;
	struct { uint8_t what[8]; struct tp_wire_addr addr; } __attribute__((packed)) text = { .what = "comm-id" };
	uint8_t key[TP_SECRET_BYTES] = {0};
	char secret[4096] = "", where[TP_ADDR_TEXT];
	const char *given = tp_param_string(&id_params[P_JOB_SECRET]), *path = tp_param_string(&id_params[P_JOB_SECRET_FILE]);
	if (given) snprintf(secret, sizeof(secret), "%s", given);
	else if (path) TP_TRY(read_secret_file(path, secret, sizeof(secret)));
	tp_addr_format(addr, where);
	if ((given || path) && strlen(secret) < 8)
		return TP_FAIL(ncclInvalidUsage, "the job's secret (%s) has %zu characters; give it 8 at least", given ? "TELPHER_JOB_SECRET" : path, strlen(secret));
	if (!given && !path && !tp_service_is_loopback(addr))
		return TP_FAIL(ncclInvalidUsage, "NCCL_COMM_ID=%s carries no secret, so anybody could join: set TELPHER_JOB_SECRET (or TELPHER_JOB_SECRET_FILE) "
			"to the same words on all ranks, or use ncclGetUniqueId without NCCL_COMM_ID", where);
	if (!given && !path && !atomic_exchange_explicit(&warned, true, memory_order_relaxed))
		TP_WARN("NCCL_COMM_ID=%s without TELPHER_JOB_SECRET: any process of this machine can join", where);
	tp_wire_addr_put(&text.addr, addr);
	tp_secret_mac(key, secret, strlen(secret), key);
	tp_secret_mac(key, &text, sizeof(text), out);
	return ncclSuccess;
}

static ncclResult_t id_from_address(const char *address, ncclUniqueId *out)
{
	struct tp_id id = { .flags = TP_ID_ENV };
	TP_TRY(tp_addr_parse(address, "NCCL_COMM_ID", &id.root));
	TP_TRY(job_secret(&id.root, id.secret));
	tp_id_write(&id, out);
	return ncclSuccess;
}

ncclResult_t tp_boot_unique_id(ncclUniqueId *out)
{
	struct tp_id id = {0};
	struct tp_root *root;
	const char *address = tp_param_string(&id_params[P_COMM_ID]);
	if (address && *address) return id_from_address(address, out);
	tp_secret_random(id.secret, sizeof(id.secret));
	id.name = tp_id_name(id.secret);
	tp_service_lock();
	ncclResult_t result = tp_service_use();
	if (result == ncclSuccess) {
		id.root = tp_service.addr;
		result = tp_root_serve(&id, &root);
		tp_service_unuse();             /* the root counts itself */
	}
	tp_service_unlock();
	if (result == ncclSuccess) tp_id_write(&id, out);
	return result;
}

ncclResult_t tp_boot_derive_id(const struct tp_boot *parent, int root_rank, const void *salt, size_t salt_bytes, ncclUniqueId *out)
{
	struct tp_id id = { .flags = TP_ID_DERIVED };
	struct { uint8_t what[8]; int32_t root_rank; uint8_t salt[TP_SECRET_BYTES]; } __attribute__((packed)) text = { .what = "derive" };
	if (root_rank < 0 || root_rank >= parent->nranks)
		return TP_FAIL(ncclInternalError, "rank %d can't be root of a derived communicator: the parent has %d ranks", root_rank, parent->nranks);
	text.root_rank = root_rank;
	tp_secret_mac(parent->secret, salt, salt_bytes, text.salt);
	tp_secret_mac(parent->secret, &text, sizeof(text), id.secret);
	id.root = parent->peers[root_rank].service;
	tp_id_write(&id, out);
	return ncclSuccess;
}

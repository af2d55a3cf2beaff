/* ncclConfig_t of every size since 2.14, checked. A field counts only where the caller's header had it: by size and by
 * version, since some fields lie where older versions had padding. */
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "comm/internal.h"

enum { PARAM_BLOCKING, PARAM_CTA_POLICY };
static struct tp_param params[] = {
	[PARAM_BLOCKING] = { .name = "NCCL_COMM_BLOCKING", .kind = TP_PARAM_INT, .fallback = "-1", .min = -1, .max = 1,
		.doc = "1: calls block, 0: they don't, whatever the configuration says; -1: it decides" },
	[PARAM_CTA_POLICY] = { .name = "NCCL_CTA_POLICY", .kind = TP_PARAM_STRING,
		.doc = "GPU ranks: DEFAULT, EFFICIENCY or ZERO (or 0, 1, 2; several with | between), whatever the configuration says; ZERO: all-gather, all-to-all and "
			"broadcast into symmetric windows go by copy engines at any size; rank 0's counts" },
};
TP_PARAM_TABLE("comm", params)

struct field {
	const char *name;
	size_t offset;
	int since;                  /* version code */
	int min, max;
	size_t target;              /* in struct tp_config */
	int fallback;
};

#define FIELD(name_, since_, min_, max_, target_, fallback_) \
	{ #name_, offsetof(ncclConfig_t, name_), since_, min_, max_, offsetof(struct tp_config, target_), fallback_ }
static const struct field fields[] = {
	FIELD(cgaClusterSize, NCCL_VERSION(2, 17, 0), 0, 8, cga, 4),
	FIELD(minCTAs, NCCL_VERSION(2, 17, 0), 1, INT_MAX, min_ctas, 1),
	FIELD(maxCTAs, NCCL_VERSION(2, 17, 0), 1, INT_MAX, max_ctas, 64),
	FIELD(splitShare, NCCL_VERSION(2, 18, 0), 0, 1, split_share, 0),
	FIELD(trafficClass, NCCL_VERSION(2, 26, 0), 0, INT_MAX, traffic_class, NCCL_CONFIG_UNDEF_INT),
	FIELD(collnetEnable, NCCL_VERSION(2, 27, 0), 0, 1, collnet, 0),
	FIELD(CTAPolicy, NCCL_VERSION(2, 27, 0), 0, NCCL_CTA_POLICY_EFFICIENCY | NCCL_CTA_POLICY_ZERO, cta_policy, 0),
	FIELD(shrinkShare, NCCL_VERSION(2, 27, 0), 0, 1, shrink_share, 0),
	FIELD(nvlsCTAs, NCCL_VERSION(2, 27, 0), 1, INT_MAX, nvls_ctas, NCCL_CONFIG_UNDEF_INT),
	FIELD(nChannelsPerNetPeer, NCCL_VERSION(2, 28, 0), 1, INT_MAX, channels_per_net_peer, NCCL_CONFIG_UNDEF_INT),
	FIELD(nvlinkCentricSched, NCCL_VERSION(2, 28, 0), 0, 1, nvlink_sched, 0),
};

static const size_t smallest = offsetof(ncclConfig_t, blocking) + sizeof(int);

static ncclResult_t read_fields(const ncclConfig_t *own, struct tp_config *out)
{
	for (size_t i = 0; i < TP_ARRAY_LEN(fields); i++) {
		const struct field *f = &fields[i];
		int value = NCCL_CONFIG_UNDEF_INT;
		if ((int)own->version >= f->since) memcpy(&value, (const char *)own + f->offset, sizeof(value));
		if (value == NCCL_CONFIG_UNDEF_INT) continue;
		if (value < f->min || value > f->max)
			return TP_FAIL(ncclInvalidArgument, "ncclConfig_t: %s is %d; it must be in [%d, %d] or NCCL_CONFIG_UNDEF_INT", f->name, value,
				f->min, f->max);
		memcpy((char *)out + f->target, &value, sizeof(value));
	}
	if (out->min_ctas > out->max_ctas)
		return TP_FAIL(ncclInvalidArgument, "ncclConfig_t: minCTAs %d is greater than maxCTAs %d", out->min_ctas, out->max_ctas);
	if (own->blocking != NCCL_CONFIG_UNDEF_INT) {
		if (own->blocking != 0 && own->blocking != 1)
			return TP_FAIL(ncclInvalidArgument, "ncclConfig_t: blocking is %d; it must be 0, 1 or NCCL_CONFIG_UNDEF_INT", own->blocking);
		out->blocking = own->blocking;
	}
	return ncclSuccess;
}

static ncclResult_t read_name(const char *field, const char *name, char *out, size_t room)
{
	if (!name) return ncclSuccess;
	if (strnlen(name, room) == room)
		return TP_FAIL(ncclInvalidArgument, "ncclConfig_t: %s is longer than %zu characters", field, room - 1);
	memcpy(out, name, strlen(name) + 1);
	return ncclSuccess;
}

/* NCCL_CTA_POLICY over what the configuration says. */
static ncclResult_t read_policy(int *out)
{
	static const struct { const char *name; int value; } names[] = { { "DEFAULT", NCCL_CTA_POLICY_DEFAULT }, { "EFFICIENCY", NCCL_CTA_POLICY_EFFICIENCY },
		{ "ZERO", NCCL_CTA_POLICY_ZERO }, { "0", NCCL_CTA_POLICY_DEFAULT }, { "1", NCCL_CTA_POLICY_EFFICIENCY }, { "2", NCCL_CTA_POLICY_ZERO } };
	const char *text = tp_param_string(&params[PARAM_CTA_POLICY]);
	int policy = 0;
	if (!text || !*text) return ncclSuccess;
	for (const char *at = text, *end; at; at = *end ? end + 1 : NULL) {
		size_t i = 0;
		end = strchrnul(at, '|');
		while (i < TP_ARRAY_LEN(names) && (strlen(names[i].name) != (size_t)(end - at) || strncasecmp(names[i].name, at, (size_t)(end - at)))) i++;
		if (i == TP_ARRAY_LEN(names))
			return TP_FAIL(ncclInvalidUsage, "NCCL_CTA_POLICY: '%s' can't be read at '%s': wanted is DEFAULT, EFFICIENCY or ZERO (or 0, 1, 2), with | between", text, at);
		policy |= names[i].value;
	}
	*out = policy;
	return ncclSuccess;
}

static void fill_defaults(struct tp_config *out)
{
	*out = (struct tp_config){ .blocking = true };
	for (size_t i = 0; i < TP_ARRAY_LEN(fields); i++)
		memcpy((char *)out + fields[i].target, &fields[i].fallback, sizeof(int));
}

ncclResult_t tp_config_read(const ncclConfig_t *config, const struct tp_config *parent, struct tp_config *out)
{
	struct tp_config read;
	if (parent) read = *parent;
	else fill_defaults(&read);
	if (config) {
		if (config->size < smallest || config->size > 4096)
			return TP_FAIL(ncclInvalidArgument, "ncclConfig_t: size is %zu, which no version of NCCL had; was it set by "
				"NCCL_CONFIG_INITIALIZER?", config->size);
		if (config->magic != TP_CONFIG_MAGIC)
			return TP_FAIL(ncclInvalidArgument, "ncclConfig_t: magic is 0x%x, not 0x%x; was it set by NCCL_CONFIG_INITIALIZER?",
				config->magic, TP_CONFIG_MAGIC);
		if ((int)config->version < NCCL_VERSION(2, 14, 0))
			return TP_FAIL(ncclInvalidArgument, "ncclConfig_t: version is %u; the first with a configuration was %d", config->version,
				NCCL_VERSION(2, 14, 0));
		ncclConfig_t own = NCCL_CONFIG_INITIALIZER;
		memcpy(&own, config, TP_MIN(config->size, sizeof(own)));
		TP_TRY(read_fields(&own, &read));
		if ((int)own.version >= NCCL_VERSION(2, 17, 0)) TP_TRY(read_name("netName", own.netName, read.net_name, sizeof(read.net_name)));
		if ((int)own.version >= NCCL_VERSION(2, 27, 0)) TP_TRY(read_name("commName", own.commName, read.comm_name, sizeof(read.comm_name)));
	}
	TP_TRY(read_policy(&read.cta_policy));
	int64_t blocking = tp_param_int(&params[PARAM_BLOCKING]);
	if (blocking >= 0) read.blocking = blocking == 1;
	*out = read;
	return ncclSuccess;
}

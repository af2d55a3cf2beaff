#include "topo/helper_search.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *helper_file(const char *path)
{
	FILE *file = fopen(path, "re");
	if (!file) fail_msg("%s can't be opened", path);
	char *text = calloc(1, 1 << 20);
	assert_non_null(text);
	size_t bytes = fread(text, 1, (1 << 20) - 1, file);
	assert_true(bytes > 0);
	fclose(file);
	return text;
}

struct tp_topo_policy helper_policy(bool multi_host)
{
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	policy.multi_host = multi_host;
	return policy;
}

struct tp_topo *helper_machine(const char *name, const char *from, const char *to, bool multi_host)
{
	char path[512];
	struct tp_topo_policy policy = helper_policy(multi_host);
	snprintf(path, sizeof(path), "%s/%s", TOPO_DATA, name);
	char *text = helper_file(path);
	if (from) {
		char *at = strstr(text, from), *changed = calloc(1, strlen(text) + strlen(to) + 1);
		if (!at) fail_msg("%s holds no %s", name, from);
		memcpy(changed, text, (size_t)(at - text));
		strcat(changed, to);
		strcat(changed, at + strlen(from));
		free(text);
		text = changed;
	}
	struct tp_topo *topo = helper_topo(text, &policy);
	free(text);
	return topo;
}

struct tp_channels *helper_channels(const struct tp_topo *topo, enum tp_pattern pattern, bool multi_host)
{
	struct tp_channels *channels = NULL;
	struct tp_topo_policy policy = helper_policy(multi_host);
	char why[256];
	assert_int_equal(tp_channels_search(topo, &policy, pattern, &channels), ncclSuccess);
	if (tp_channels_check(topo, &policy, channels, why) != ncclSuccess) fail_msg("%s", why);
	return channels;
}

double helper_total(const struct tp_channels *channels) { return channels->nchannels * channels->bw_inter; }

const char *helper_found(const struct tp_channels *channels, enum tp_finding_kind kind)
{
	for (int i = 0; i < channels->nfindings; i++)
		if (channels->findings[i].kind == kind) return channels->findings[i].text;
	return NULL;
}

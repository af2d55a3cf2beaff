/* Which network a communicator uses. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include "base/fork.h"
#include "net/net.h"
#include "net/plugin/plugin.h"

static struct tp_param net_params[] = {
	{ .name = "NCCL_NET", .kind = TP_PARAM_STRING, .doc = "network to use, by name (IB, Socket, or a plug-in's); init fails where it can't be used" },
};
TP_PARAM_TABLE("net", net_params)

/* Best first; a plug-in comes before them. */
static const struct tp_net_ops *const networks[] = {
#ifdef TELPHER_IB
	&tp_net_ib,
#endif
	&tp_net_socket,
};

#define WHY_BYTES 512
static char reasons[TP_ARRAY_LEN(networks)][WHY_BYTES];
static bool failed[TP_ARRAY_LEN(networks)];
static pthread_mutex_t reasons_lock = PTHREAD_MUTEX_INITIALIZER;
TP_FORK_HOLD(TP_FORK_BASE, reasons_lock)

const char *tp_net_why_not(const struct tp_net_ops *ops)
{
	const char *why = NULL;

	pthread_mutex_lock(&reasons_lock);
	for (size_t i = 0; i < TP_ARRAY_LEN(networks); i++)
		if (networks[i] == ops && failed[i]) why = reasons[i];
	pthread_mutex_unlock(&reasons_lock);
	return why;
}

const char *tp_net_why_not_named(const char *name)
{
	for (size_t i = 0; i < TP_ARRAY_LEN(networks); i++)
		if (strcasecmp(name, networks[i]->name) == 0) return tp_net_why_not(networks[i]);
	if (tp_net_plugin_exists(name)) return tp_net_plugin_why_not(name);
	return strcasecmp(name, "IB") == 0 ? "this library was built without it" : "there is no plug-in of that name (NCCL_NET_PLUGIN)";
}

bool tp_net_is_forced(void)
{
	const char *forced = tp_param_string(&net_params[0]);
	return forced && *forced;
}

static ncclResult_t try_network(size_t i, bool asked)
{
	const struct tp_net_ops *ops = networks[i];
	char why[WHY_BYTES];
	int count = 0;
	ncclResult_t result;

	/* What isn't there at all is no error to be logged. */
	if (ops->present && !ops->present(asked, why, sizeof(why))) {
		pthread_mutex_lock(&reasons_lock);
		failed[i] = true;
		snprintf(reasons[i], sizeof(reasons[i]), "%s", why);
		pthread_mutex_unlock(&reasons_lock);
		TP_INFO(TP_INIT | TP_NET, "NET/%s : %s", ops->name, why);
		return ncclInvalidUsage;
	}
	result = ops->init();

	if (result == ncclSuccess) result = ops->devices(&count);
	if (result == ncclSuccess && count == 0) result = TP_FAIL(ncclInvalidUsage, "network %s has no device", ops->name);
	pthread_mutex_lock(&reasons_lock);
	failed[i] = result != ncclSuccess;
	if (failed[i]) snprintf(reasons[i], sizeof(reasons[i]), "%s", tp_log_last_error());
	pthread_mutex_unlock(&reasons_lock);
	TP_INFO(TP_INIT | TP_NET, result == ncclSuccess ? "Initialized NET plugin %s" : "Failed to initialize NET plugin %s", ops->name);
	return result;
}

/* "Socket (usable), IB (not usable: …)" */
static void list_networks(char *text, size_t size)
{
	size_t used;

	text[0] = 0;
	used = tp_net_plugin_list(text, size);
	for (size_t i = 0; i < TP_ARRAY_LEN(networks) && used < size; i++) {
		bool usable = try_network(i, false) == ncclSuccess;
		used += (size_t)snprintf(text + used, size - used, "%s%s (%s%.400s)", i ? ", " : "", networks[i]->name, usable ? "usable" : "not usable: ",
			usable ? "" : reasons[i]);
	}
}

/* Names are compared without regard to case, as NCCL does. */
static ncclResult_t choose_named(const char *name, const char *source, const struct tp_net_ops **out)
{
	char list[2048];

	*out = tp_net_plugin_choose(name, true);
	if (*out) return ncclSuccess;
	if (tp_net_plugin_exists(name)) {
		list_networks(list, sizeof(list));
		return TP_FAIL(ncclInvalidUsage, "%s=%s: that network can't be used here. There are: %s", source, name, list);
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(networks); i++) {
		if (strcasecmp(name, networks[i]->name) != 0) continue;
		if (try_network(i, true) != ncclSuccess) {
			list_networks(list, sizeof(list));
			return TP_FAIL(ncclInvalidUsage, "%s=%s: that network can't be used here. There are: %s", source, name, list);
		}
		*out = networks[i];
		return ncclSuccess;
	}
	list_networks(list, sizeof(list));
	return TP_FAIL(ncclInvalidUsage, "%s=%s: there is no such network. There are: %s", source, name, list);
}

ncclResult_t tp_net_choose(const char *name, const struct tp_net_ops **out)
{
	const char *forced = tp_param_string(&net_params[0]);
	const struct tp_net_ops *ops = NULL;
	char list[2048];

	if (forced && *forced) TP_TRY(choose_named(forced, "NCCL_NET", &ops));
	else if (name && *name) TP_TRY(choose_named(name, "netName", &ops));
	if (!ops) ops = tp_net_plugin_choose(NULL, false);
	for (size_t i = 0; i < TP_ARRAY_LEN(networks) && !ops; i++)
		if (try_network(i, false) == ncclSuccess) ops = networks[i];
	if (!ops) {
		list_networks(list, sizeof(list));
		return TP_FAIL(ncclInvalidUsage, "no network can be used on %s. There are: %s", tp_host_name(), list);
	}
	TP_INFO(TP_INIT | TP_NET, "Assigned NET plugin %s to comm", ops->name);
	*out = ops;
	return ncclSuccess;
}

void tp_net_log_using(const struct tp_net_ops *ops)
{
	TP_INFO(TP_INIT | TP_NET, "Using network %s", ops->name);
}

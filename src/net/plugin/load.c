/* Which plug-ins there are, and which one is used; see plugin.h. Lines and search order are NCCL's. */
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include "net/plugin/plugin.h"

static struct tp_param plugin_params[] = {
	{ .name = "NCCL_NET_PLUGIN", .kind = TP_PARAM_STRING,
		.doc = "NET plug-ins, the first usable one is used: NAME (libnccl-net-NAME.so), library or path, a list with commas; none; unset: libnccl-net.so" },
};
TP_PARAM_TABLE("net", plugin_params)

#define DEFAULT_FILE "libnccl-net.so"
#define OLDEST_KNOWN 2

static struct {
	pthread_mutex_t lock;
	bool listed, named;                     /* named: by the user */
	int count;
	struct tp_plug plugs[TP_PLUG_MAX];
	struct tp_plug *_Atomic current;        /* relaxed: who uses it has chosen it before, under the lock */
} plugins = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* Foreign code runs under it. What a plug-in is in a forked child is its own affair. */
TP_FORK_RENEW(plugins.lock)

struct tp_plug *tp_plug_current(void) { return atomic_load_explicit(&plugins.current, memory_order_relaxed); }

static void set_current(struct tp_plug *plug) { atomic_store_explicit(&plugins.current, plug, memory_order_relaxed); }

static void add(const char *name, size_t length)
{
	if (plugins.count == TP_PLUG_MAX) {
		TP_WARN("NCCL_NET_PLUGIN names more than %d plug-ins; the rest is left out", TP_PLUG_MAX);
		return;
	}
	if (length >= sizeof(plugins.plugs[0].asked)) {
		TP_WARN("NCCL_NET_PLUGIN: a name of %zu characters; at most %zu are possible, it is left out", length, sizeof(plugins.plugs[0].asked) - 1);
		return;
	}
	struct tp_plug *plug = &plugins.plugs[plugins.count++];
	memset(plug, 0, sizeof(*plug));
	snprintf(plug->asked, sizeof(plug->asked), "%.*s", (int)length, name);
}

static void list_locked(void)
{
	const char *text;

	if (plugins.listed) return;
	plugins.listed = true;
	plugins.count = 0;
	set_current(NULL);
	text = tp_param_string(&plugin_params[0]);
	plugins.named = text != NULL && tp_param_is_set(&plugin_params[0]);
	if (!plugins.named) {
		add(DEFAULT_FILE, strlen(DEFAULT_FILE));
		return;
	}
	TP_INFO(TP_ENV | TP_NET, "NCCL_NET_PLUGIN set by environment to %s", text);
	if (strcasecmp(text, "none") == 0) return;
	while (*text) {
		size_t length = strcspn(text, ",");
		if (length > 0) add(text, length);
		text += length + (text[length] == ',');
	}
}

static void __attribute__((format(printf, 2, 3))) set_why(struct tp_plug *plug, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(plug->why, sizeof(plug->why), format, args);
	va_end(args);
	plug->state = TP_PLUG_FAILED;
}

/* The library, or NULL. A file that isn't there goes to missing, any other reason to why (and the log, as NCCL tells it). */
static void *open_one(const char *file, char *missing, size_t missing_bytes, char *why, size_t why_bytes)
{
	void *library = dlopen(strcasecmp(file, "STATIC_PLUGIN") == 0 ? NULL : file, RTLD_NOW | RTLD_LOCAL);
	const char *error;

	if (library) return library;
	error = dlerror();
	if (error && strstr(error, file) && strstr(error, "No such file or directory")) {
		size_t used = strlen(missing);
		snprintf(missing + used, missing_bytes - used, " %s", file);
		return NULL;
	}
	snprintf(why, why_bytes, "%s", error ? error : "the loader gives no reason");
	TP_INFO(TP_INIT | TP_NET, "NET/Plugin: %s: %s", file, why);
	return NULL;
}

/* Is it a name only, from which a file's name is made? */
static bool is_suffix(const char *name)
{
	size_t length = strlen(name);
	bool library = strncmp(name, "lib", 3) == 0 && length >= 3 && strcmp(name + length - 3, ".so") == 0;

	return !strchr(name, '/') && !library;
}

static void *open_library(struct tp_plug *plug)
{
	char file[sizeof(plug->asked) + 32], missing[2 * sizeof(file)] = "", why[384] = "";
	struct link_map *map;
	void *library;

	snprintf(file, sizeof(file), "%s", plug->asked);
	library = open_one(file, missing, sizeof(missing), why, sizeof(why));
	if (!library && is_suffix(plug->asked)) {
		snprintf(file, sizeof(file), "libnccl-net-%s.so", plug->asked);
		library = open_one(file, missing, sizeof(missing), why, sizeof(why));
	}
	if (missing[0] && !library) TP_INFO(TP_INIT | TP_NET, "NET/Plugin: Could not find:%s", missing);
	if (!library && why[0]) set_why(plug, "%s", why);
	else if (!library) set_why(plug, "there is no%s on the library path (LD_LIBRARY_PATH, ldconfig)", missing);
	snprintf(plug->file, sizeof(plug->file), "%.255s", library && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] ? map->l_name : file);
	return library;
}

/* A table of a version that isn't spoken, for the message. */
static int other_version(void *library)
{
	char symbol[32];

	for (int v = 64; v >= OLDEST_KNOWN; v--) {
		snprintf(symbol, sizeof(symbol), "ncclNetPlugin_v%d", v);
		if (dlsym(library, symbol)) return v;
	}
	return 0;
}

bool tp_plug_is_taken(const char *name) { return strcasecmp(name, "Socket") == 0 || strcasecmp(name, "IB") == 0; }

static void bind_newest(struct tp_plug *plug, void *library)
{
	char symbol[32];
	const void *table = NULL;
	const char *name, *missing;
	int version = TP_ABI_LAST + 1;

	while (!table && version-- > TP_ABI_FIRST) {
		snprintf(symbol, sizeof(symbol), "ncclNetPlugin_v%d", version);
		table = dlsym(library, symbol);
	}
	if (!table) {
		int other = other_version(library);
		TP_INFO(TP_INIT | TP_NET, "External network plugin %s is unsupported", plug->file);
		if (other) set_why(plug, "its newest interface is v%d (ncclNetPlugin_v%d), and this library speaks v%d to v%d", other, other, TP_ABI_FIRST, TP_ABI_LAST);
		else set_why(plug, "it exports no ncclNetPlugin_v%d to _v%d: it is no NET plug-in", TP_ABI_FIRST, TP_ABI_LAST);
		return;
	}
	name = *(const char *const *)table;
	missing = tp_plug_bind(plug, table, version);
	if (missing) {
		set_why(plug, "the table %s has no %s (NULL)", symbol, missing);
		return;
	}
	snprintf(plug->name, sizeof(plug->name), "%s", name);
	memcpy(plug->first_name, plug->name, sizeof(plug->first_name));
	if (tp_plug_is_taken(plug->name)) {
		set_why(plug, "it calls itself %s, as a network of this library is called", plug->name);
		plug->name[0] = 0;
		return;
	}
	plug->state = TP_PLUG_LOADED;
	TP_INFO(TP_INIT | TP_NET, "NET/Plugin: Loaded net plugin %s (v%d)", plug->name, version);
	TP_INFO(TP_INIT | TP_NET, "Successfully loaded external network plugin %s", plug->file);
}

static void load(struct tp_plug *plug)
{
	void *library;

	if (plug->state != TP_PLUG_UNTRIED) return;
	library = open_library(plug);
	if (!library) return;
	bind_newest(plug, library);
	if (plug->state == TP_PLUG_FAILED) dlclose(library);
	else plug->library = library;
}

/* Whose name it answers to: its own, or what it was asked for by, where nothing could be loaded. */
static bool is_called(const struct tp_plug *plug, const char *name)
{
	return strcasecmp(plug->name[0] ? plug->name : plug->asked, name) == 0 || (plug->name[0] && strcasecmp(plug->first_name, name) == 0);
}

static void disable_others(struct tp_plug *used)
{
	char names[TP_PLUG_WHY_BYTES] = "";
	size_t length = 0;

	for (int i = 0; i < plugins.count; i++) {
		struct tp_plug *plug = &plugins.plugs[i];
		if (plug == used || plug->state == TP_PLUG_FAILED) continue;
		if (length < sizeof(names)) length += (size_t)snprintf(names + length, sizeof(names) - length, "%s%s", length ? ", " : "", plug->asked);
		set_why(plug, "plug-in %s is used, and a process uses one", used->name);
	}
	if (length) TP_INFO(TP_INIT | TP_NET, "Disabling external plugins: %s", names);
}

static void initialize(struct tp_plug *plug)
{
	ncclResult_t result;
	bool begun;

	set_current(plug);              /* its log lines carry its name */
	result = tp_plug_init(plug, 0, &plug->context);
	begun = result == ncclSuccess;

	if (begun) result = tp_plug_complete(plug);
	if (result == ncclSuccess) result = tp_plug_devices(plug);
	if (result == ncclSuccess) {
		plug->state = TP_PLUG_USABLE;
		tp_net_plugged.name = plug->name;
		disable_others(plug);
	} else {
		/* What went wrong has just been logged by whoever found it. */
		set_why(plug, "%s", tp_log_last_error());
		if (begun) tp_plug_finalize(plug, plug->context);
		set_current(NULL);
	}
	TP_INFO(TP_INIT | TP_NET, result == ncclSuccess ? "Initialized NET plugin %s" : "Failed to initialize NET plugin %s", plug->name);
}

/* A name that none has yet: one that is left may take it when it is initialized. */
static const struct tp_net_ops *choose_by_later_name(const char *name)
{
	for (int i = 0; i < plugins.count; i++) {
		struct tp_plug *plug = &plugins.plugs[i];
		if (plug->state == TP_PLUG_LOADED) initialize(plug);
		if (plug->state == TP_PLUG_USABLE) return is_called(plug, name) ? &tp_net_plugged : NULL;
	}
	return NULL;
}

const struct tp_net_ops *tp_net_plugin_choose(const char *name, bool asked)
{
	const struct tp_net_ops *found = NULL;

	pthread_mutex_lock(&plugins.lock);
	list_locked();
	for (int i = 0; i < plugins.count && !found; i++) {
		struct tp_plug *plug = &plugins.plugs[i];
		bool fresh = plug->state == TP_PLUG_UNTRIED;
		load(plug);
		if (name && !is_called(plug, name)) continue;
		if (plug->state == TP_PLUG_LOADED) {
			fresh = true;
			initialize(plug);
		}
		if (plug->state == TP_PLUG_USABLE) found = &tp_net_plugged;
		/* Who names a plug-in wants it, and hears once that there is another network instead. */
		else if (fresh && plugins.named && !asked) TP_WARN("NET plug-in %s (NCCL_NET_PLUGIN) can't be used: %s. NCCL_NET=%s makes this an error", plug->asked, plug->why,
			plug->name[0] ? plug->name : plug->asked);
	}
	if (!found && name && !tp_plug_is_taken(name)) found = choose_by_later_name(name);
	pthread_mutex_unlock(&plugins.lock);
	return found;
}

bool tp_net_plugin_exists(const char *name)
{
	bool exists = false;

	pthread_mutex_lock(&plugins.lock);
	list_locked();
	for (int i = 0; i < plugins.count; i++) {
		load(&plugins.plugs[i]);
		/* The default's file is no name that anybody gives a network. */
		exists |= (plugins.named || plugins.plugs[i].name[0]) && is_called(&plugins.plugs[i], name);
	}
	pthread_mutex_unlock(&plugins.lock);
	return exists;
}

const char *tp_net_plugin_why_not(const char *name)
{
	const char *why = NULL;

	pthread_mutex_lock(&plugins.lock);
	/* Failure is for good, so the text stays. */
	for (int i = 0; i < plugins.count && !why; i++)
		if (plugins.plugs[i].state == TP_PLUG_FAILED && is_called(&plugins.plugs[i], name)) why = plugins.plugs[i].why;
	pthread_mutex_unlock(&plugins.lock);
	return why;
}

size_t tp_net_plugin_list(char *text, size_t bytes)
{
	size_t used = 0;

	pthread_mutex_lock(&plugins.lock);
	list_locked();
	for (int i = 0; i < plugins.count && used < bytes; i++) {
		struct tp_plug *plug = &plugins.plugs[i];
		if (plug->state == TP_PLUG_UNTRIED) load(plug);
		if (plug->state == TP_PLUG_LOADED) initialize(plug);
		if (!plugins.named && !plug->name[0]) continue;         /* nobody has put one there */
		used += (size_t)snprintf(text + used, bytes - used, "%s (%s%.300s), ", plug->name[0] ? plug->name : plug->asked,
			plug->state == TP_PLUG_USABLE ? "usable" : "not usable: ", plug->state == TP_PLUG_USABLE ? "" : plug->why);
	}
	pthread_mutex_unlock(&plugins.lock);
	return TP_MIN(used, bytes);
}

void tp_net_plugin_forget(void)
{
	pthread_mutex_lock(&plugins.lock);
	for (int i = 0; i < plugins.count; i++) {
		struct tp_plug *plug = &plugins.plugs[i];
		if (plug->state == TP_PLUG_USABLE) tp_plug_finalize(plug, plug->context);
		if (plug->library) dlclose(plug->library);
	}
	plugins.listed = false;
	plugins.count = 0;
	set_current(NULL);
	pthread_mutex_unlock(&plugins.lock);
}

/* What the files of base share among themselves; no other folder includes this. */
#ifndef TP_BASE_INTERNAL_H
#define TP_BASE_INTERNAL_H

#include "base/base.h"

/* The last component names of a source path: "base/log.c". */
const char *tp_log_short_file(const char *file);

/* A copy of text that lives as long as the process, one for all equal texts; NULL without memory. Values of parameters
 * are such: whoever holds one may keep it, whatever is read anew. */
const char *tp_intern(const char *text);

/* Configuration files (conf.c). */
#define TP_CONF_WARNINGS 8
struct tp_conf_entry { char *name, *value; const char *file; int line; };
struct tp_conf {
	struct tp_conf_entry *entries;
	size_t count, capacity;
	char *warnings[TP_CONF_WARNINGS];   /* of more, the first count */
	int nwarnings;
};
/* Parses text (not zero-terminated) as the contents of file, whose name must outlive conf; a bad line is a warning and is
 * left out. Of several lines with one name the first counts. */
void tp_conf_parse(struct tp_conf *conf, const char *text, size_t bytes, const char *file);
void tp_conf_free(struct tp_conf *conf);
/* Looks name up in the process's files; the texts live on. Thread-safe. */
bool tp_conf_find(const char *name, const char **value, const char **file);
bool tp_conf_name_at(size_t index, const char **name, const char **file);
/* Reads the files anew at the next look-up. */
void tp_conf_reload(void);

/* Forgets one table's values. */
void tp_param_forget(struct tp_param *params, size_t count);
/* Reads the value of text into number; false where it isn't a value of param's kind and range. */
bool tp_param_parse(const struct tp_param *param, const char *text, int64_t *number);

/* Around a fork, by the logger, whose locks come after: a child must find no lock of base held by a thread that it lacks. */
void tp_param_before_fork(void);
void tp_param_after_fork(void);
void tp_conf_before_fork(void);
void tp_conf_after_fork(void);
void tp_report_before_fork(void);
void tp_report_after_fork(void);

/* Lets tp_param_report_environment speak again. */
void tp_param_report_again(void);

/* The known name nearest to name among count names: NULL where none is near enough to be what was meant. */
const char *tp_param_nearest(const char *name, const char *const *names, size_t count);

/* Reasons of the names without effect (env_names.c), sorted by name. */
struct tp_env_reason { const char *name, *why; };
extern const struct tp_env_reason tp_env_reasons[];
extern const size_t tp_env_reason_count;

/* Like tp_addr_parse, with numeric hosts only: asks no name server. */
ncclResult_t tp_addr_parse_numeric(const char *text, const char *what, union tp_addr *out);
/* Is the interface in the set that spec describes in NCCL_SOCKET_IFNAME's syntax? */
bool tp_interface_allowed(const char *spec, const char *name);
/* Those of all that NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY allow, or the best kind there is; returns how many. */
struct ifaddrs;
int tp_interface_choose(const struct ifaddrs *all, struct tp_interface *out, int max);

#endif

/* The one parameter table. A component declares an array of struct tp_param and registers it with TP_PARAM_TABLE;
 * from these come the environment variable, the configuration files (NCCL_CONF_FILE, ~/.nccl.conf, /etc/nccl.conf;
 * the environment wins, then NCCL_CONF_FILE or, where that is unset, ~/.nccl.conf), `telpher env` and the manual page. Values are read once, at first use. */
#ifndef TP_BASE_PARAM_H
#define TP_BASE_PARAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum tp_param_kind { TP_PARAM_INT, TP_PARAM_BYTES /* 64K, 4M */, TP_PARAM_BOOL, TP_PARAM_STRING, TP_PARAM_ENUM };
enum tp_param_origin { TP_FROM_DEFAULT, TP_FROM_ENVIRONMENT, TP_FROM_FILE };

struct tp_param {
	const char *name;           /* "NCCL_BUFFSIZE", "TELPHER_DEVICE" */
	enum tp_param_kind kind;
	const char *fallback;       /* the default, as one would write it; NULL: unset */
	int64_t min, max;           /* INT and BYTES: the range, both ends in it */
	const char *choices;        /* ENUM: "host|cuda|auto"; the value is the index */
	const char *doc;            /* one line */
	/* what follows is the reader's */
	int64_t number;
	const char *text;
	enum tp_param_origin origin;
	const char *origin_file;
	int state;
};

struct tp_param_table {
	const char *component;      /* "boot": a section of `telpher env`; several tables may share it */
	struct tp_param *params;
	size_t count;
	struct tp_param_table *next;
};

void tp_param_register(struct tp_param_table *table);
#define TP_PARAM_TABLE(component_, array_) \
	static struct tp_param_table array_##_table = { component_, array_, sizeof(array_) / sizeof(array_[0]), NULL }; \
	__attribute__((constructor)) static void array_##_register(void) { tp_param_register(&array_##_table); }

/* A value out of range or unreadable is a WARN that says what was found and what would be right; the default is used. */
int64_t tp_param_int(struct tp_param *param);        /* also BOOL (0 or 1) and ENUM (index) */
const char *tp_param_string(struct tp_param *param); /* NULL where unset and without default */
bool tp_param_is_secret(const struct tp_param *param);  /* its value is for nobody to see: never log or print it */
bool tp_param_is_set(struct tp_param *param);        /* by the environment or a file */
const struct tp_param_table *tp_param_first_table(void);
struct tp_param *tp_param_find(const char *name);
/* Once a process, at the first communicator's init: logs what is set (INFO ENV), warns of TELPHER_* names that don't
 * exist (with the nearest one) and says once which NCCL_* names that are set have no effect here, and why. */
void tp_param_report_environment(void);
/* Forgets what was read (tests only; not while another thread reads). */
void tp_param_reload(void);

/* Every NCCL_* name that NCCL has, sorted: honoured here, or without effect and why. For `telpher env`. */
enum tp_env_status { TP_ENV_HONOURED, TP_ENV_NO_EFFECT, TP_ENV_UNKNOWN };
struct tp_env_name { const char *name; enum tp_env_status status; const char *why; };
const struct tp_env_name *tp_env_names(size_t *count);
/* Visits every NCCL_* and TELPHER_* name that is set; where: "environment" or the file. text: why it has no effect; the nearest
 * name to an unknown one, or NULL. Variables of builds and images (NCCL_VERSION) are left out. */
typedef void tp_env_visit(void *arg, const char *name, const char *where, enum tp_env_status status, const char *text);
void tp_env_visit_set(tp_env_visit *visit, void *arg);

#endif

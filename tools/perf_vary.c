/* `--np` and `--vary`: this program started again, as a job, and for each value of a variable in turn. Parameters are read
 * once in a process's life, so each value needs processes of its own; their results come back as JSON. */
#include "tools.h"
#include "perf.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"

#define MOST_VALUES 32

static char self[4096];

static int find_self(void)
{
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
	if (n <= 0) { fprintf(stderr, "telpher perf: where this program lies could not be found out\n"); return 1; }
	self[n] = 0;
	return 0;
}

/* argv of the child: with a job of processes "telpher run -n N --hosts K --no-prefix -- telpher perf …", then our own words and
 * what undoes --np, --hosts, --vary and -J of them: of two the last counts. */
static char **child_argv(int argc, char **argv, int nprocs, int nhosts, char *json)
{
	char **out = calloc((size_t)argc + 16, sizeof(char *));
	static char np[16], hosts[16];
	int n = 0;
	if (!out) return NULL;
	out[n++] = self;
	if (nprocs) {
		snprintf(np, sizeof(np), "%d", nprocs);
		snprintf(hosts, sizeof(hosts), "%d", nhosts);
		char *const job[] = { "run", "-n", np, "--hosts", hosts, "--no-prefix", "--", self };
		for (size_t i = 0; i < TP_ARRAY_LEN(job); i++) out[n++] = job[i];
	}
	out[n++] = "perf";
	for (int i = 1; i < argc; i++) out[n++] = argv[i];
	char *const undo[] = { "--np=0", "--hosts=1", "--vary=" };
	for (size_t i = 0; i < TP_ARRAY_LEN(undo); i++) out[n++] = undo[i];
	if (json) { out[n++] = "-J"; out[n++] = json; }
	return out;
}

int perf_spawn(int argc, char **argv, int nprocs, int nhosts)
{
	if (find_self()) return 1;
	char **words = child_argv(argc, argv, nprocs, nhosts, NULL);
	if (words) execv(self, words);
	perror("telpher perf: the job could not be started");
	return 1;
}

static cJSON *parse_file(int fd)
{
	cJSON *json = NULL;
	off_t size = lseek(fd, 0, SEEK_END);
	char *text = size > 0 ? calloc(1, (size_t)size + 1) : NULL;
	if (text && pread(fd, text, (size_t)size, 0) == size) json = cJSON_Parse(text);
	free(text);
	return json;
}

/* The results come back through memory that the processes inherit: nothing to clean up, however this ends. */
static cJSON *run_value(const char *name, const char *value, int argc, char **argv, int nprocs, int nhosts, bool *failed)
{
	char path[64];
	int fd = memfd_create("telpher-perf", 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	char **words = fd < 0 ? NULL : child_argv(argc, argv, nprocs, nhosts, path);
	if (!words) { perror("telpher perf: no memory for results"); exit(1); }
	fflush(NULL);
	pid_t pid = fork();
	if (pid == 0) {
		int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
		if (null >= 0) dup2(null, 1);
		setenv(name, value, 1);
		execv(self, words);
		_exit(127);
	}
	int status = -1;
	free(words);
	if (pid > 0) while (waitpid(pid, &status, 0) < 0 && errno == EINTR) { }
	cJSON *json = parse_file(fd);
	close(fd);
	if (json && status == 0) return json;
	fprintf(stderr, "telpher perf: the run with %s=%s failed\n", name, value);
	*failed = true;
	return json;
}

static double number(const cJSON *json, const char *name) { return cJSON_GetNumberValue(cJSON_GetObjectItem(json, name)); }

static void print_table(const char *name, char *const *values, cJSON *const *runs, int n)
{
	const cJSON *first = NULL;
	for (int v = 0; v < n && !first; v++) first = runs[v] ? cJSON_GetObjectItem(runs[v], "results") : NULL;
	printf("# out of place: us and busbw (GB/s) for each value of %s\n#%11s  %12s  %8s  %6s  %6s",
		name, "size", "count", "type", "redop", "root");
	for (int v = 0; v < n; v++) printf("  %18s", values[v]);
	printf("\n");
	for (int i = 0; i < (first ? cJSON_GetArraySize(first) : 0); i++) {
		const cJSON *line = cJSON_GetArrayItem(first, i);
		printf("%12.0f  %12.0f  %8s  %6s  %6.0f", number(line, "size"), number(line, "count"), cJSON_GetStringValue(cJSON_GetObjectItem(line, "type")),
			cJSON_GetStringValue(cJSON_GetObjectItem(line, "redop")), number(line, "root"));
		for (int v = 0; v < n; v++) {
			const cJSON *cell = runs[v] ? cJSON_GetArrayItem(cJSON_GetObjectItem(runs[v], "results"), i) : NULL;
			const cJSON *sample = cell ? cJSON_GetObjectItem(cell, "out_of_place") : NULL;
			if (sample) printf("  %10.2f %7.2f", number(sample, "time_us"), number(sample, "busbw_gbs"));
			else printf("  %18s", "failed");
		}
		printf("\n");
	}
}

static bool write_runs(const char *name, char *const *values, cJSON *const *runs, int n, FILE *out)
{
	cJSON *all = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(all, "runs");
	cJSON_AddStringToObject(all, "vary", name);
	for (int v = 0; v < n; v++) {
		cJSON *run = runs[v] ? cJSON_Duplicate(runs[v], true) : cJSON_CreateObject();
		cJSON_AddStringToObject(run, "value", values[v]);
		if (!runs[v]) cJSON_AddTrueToObject(run, "failed");
		cJSON_AddItemToArray(list, run);
	}
	return perf_write_json(all, out);
}

static int vary(const char *name, char *list, int argc, char **argv, int nprocs, int nhosts, FILE *json)
{
	char *values[MOST_VALUES], *saved = NULL;
	cJSON *runs[MOST_VALUES];
	double wrong = 0;
	int n = 0;
	bool failed = false;
	for (char *value = strtok_r(list, ",", &saved); value; value = strtok_r(NULL, ",", &saved)) {
		if (n == MOST_VALUES) return tool_usage_error("perf", "--vary takes %d values at most", MOST_VALUES);
		values[n++] = value;
	}
	if (find_self()) return 1;
	for (int v = 0; v < n; v++) {
		runs[v] = run_value(name, values[v], argc, argv, nprocs, nhosts, &failed);
		if (runs[v]) wrong += number(runs[v], "out_of_bounds");
	}
	print_table(name, values, runs, n);
	printf("# Out of bounds values : %.0f %s\n", wrong, wrong != 0 ? "FAILED" : "OK");
	if (json && !write_runs(name, values, runs, n, json)) failed = true;
	for (int v = 0; v < n; v++) cJSON_Delete(runs[v]);
	return failed;
}

int perf_vary(const char *assignment, int argc, char **argv, int nprocs, int nhosts, FILE *json)
{
	if (getenv("TELPHER_RANK") || getenv("OMPI_COMM_WORLD_RANK") || getenv("PMI_RANK"))
		return tool_usage_error("perf", "--vary starts jobs of its own: use it with --np N [--hosts K], not under a launcher");
	char *name = strdup(assignment), *list = name ? strchr(name, '=') : NULL;
	int status;
	if (!list || list == name || !list[strspn(list, "=,")]) {
		status = tool_usage_error("perf", "--vary takes NAME=A,B,C, got '%s'", assignment);
	} else {
		*list++ = 0;
		status = vary(name, list, argc, argv, nprocs, nhosts, json);
	}
	free(name);
	return status;
}

/* `--np` and `--vary`: this program started again, as a job, and for each value of a variable in turn. Parameters are read
 * once in a process's life, so each value needs processes of its own; their results come back as JSON. */
#include "tools.h"
#include "perf.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char self[4096];

static int find_self(void)
{
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
	if (n <= 0) { fprintf(stderr, "telpher perf: where this program lies could not be found out\n"); return 1; }
	self[n] = 0;
	return 0;
}

/* argv of the child: with a job of processes "telpher run -n N --hosts K --no-prefix -- telpher perf …", without --np,
 * --hosts, --vary and -J of our own. Ends with the extra words. */
static char **child_argv(int argc, char **argv, int nprocs, int nhosts, const char *json)
{
	static const char *const dropped[] = { "--np", "--hosts", "--vary" };
	char **out = calloc((size_t)argc + 16, sizeof(char *));
	static char np[16], hosts[16];
	int n = 0;
	if (!out) return NULL;
	out[n++] = self;
	if (nprocs) {
		snprintf(np, sizeof(np), "%d", nprocs);
		snprintf(hosts, sizeof(hosts), "%d", nhosts);
		char *const job[] = { "run", "-n", np, "--hosts", hosts, "--no-prefix", "--", self };
		for (size_t i = 0; i < sizeof(job) / sizeof(job[0]); i++) out[n++] = job[i];
	}
	out[n++] = "perf";
	for (int i = 1; i < argc; i++) {
		bool drop = false;
		for (size_t d = 0; d < sizeof(dropped) / sizeof(dropped[0]); d++) {
			size_t len = strlen(dropped[d]);
			if (!strcmp(argv[i], dropped[d])) { drop = true; i++; break; }
			if (!strncmp(argv[i], dropped[d], len) && argv[i][len] == '=') { drop = true; break; }
		}
		if (json && !drop && (!strcmp(argv[i], "-J") || !strcmp(argv[i], "--json"))) { i++; continue; }
		if (!drop) out[n++] = argv[i];
	}
	if (json) { out[n++] = "-J"; out[n++] = (char *)json; }
	out[n] = NULL;
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

static cJSON *run_value(const char *name, const char *value, int argc, char **argv, int nprocs, int nhosts)
{
	char path[] = "/tmp/telpher-perf-XXXXXX";
	int fd = mkstemp(path);
	char **words = fd < 0 ? NULL : child_argv(argc, argv, nprocs, nhosts, path);
	if (!words) { perror("telpher perf: no temporary file"); return NULL; }
	fflush(NULL);
	pid_t pid = fork();
	if (pid == 0) {
		int null = open("/dev/null", O_WRONLY);
		if (null >= 0) dup2(null, 1);
		setenv(name, value, 1);
		execv(self, words);
		_exit(127);
	}
	int status = 0;
	free(words);
	if (pid < 0 || waitpid(pid, &status, 0) != pid) status = -1;
	cJSON *json = NULL;
	off_t size = lseek(fd, 0, SEEK_END);
	char *text = size > 0 ? calloc(1, (size_t)size + 1) : NULL;
	if (text && pread(fd, text, (size_t)size, 0) == size) json = cJSON_Parse(text);
	free(text);
	close(fd);
	unlink(path);
	if (!json) fprintf(stderr, "telpher perf: the run with %s=%s failed\n", name, value);
	else if (status) fprintf(stderr, "telpher perf: the run with %s=%s ended with status %d\n", name, value, status);
	return json;
}

static double number(const cJSON *json, const char *name) { return cJSON_GetNumberValue(cJSON_GetObjectItem(json, name)); }

static void print_table(const char *name, char *const *values, cJSON *const *runs, int n)
{
	const cJSON *first = NULL;
	for (int v = 0; v < n && !first; v++) first = runs[v] ? cJSON_GetObjectItem(runs[v], "results") : NULL;
	printf("# out of place: us and busbw (GB/s) for each value of %s\n#%11s  %12s  %8s  %6s",
		name, "size", "count", "type", "redop");
	for (int v = 0; v < n; v++) printf("  %18s", values[v]);
	printf("\n");
	for (int i = 0; i < (first ? cJSON_GetArraySize(first) : 0); i++) {
		const cJSON *line = cJSON_GetArrayItem(first, i);
		printf("%12.0f  %12.0f  %8s  %6s", number(line, "size"), number(line, "count"), cJSON_GetStringValue(cJSON_GetObjectItem(line, "type")),
			cJSON_GetStringValue(cJSON_GetObjectItem(line, "redop")));
		for (int v = 0; v < n; v++) {
			const cJSON *cell = runs[v] ? cJSON_GetArrayItem(cJSON_GetObjectItem(runs[v], "results"), i) : NULL;
			const cJSON *sample = cell ? cJSON_GetObjectItem(cell, "out_of_place") : NULL;
			if (sample) printf("  %10.2f %7.2f", number(sample, "time_us"), number(sample, "busbw_gbs"));
			else printf("  %18s", "failed");
		}
		printf("\n");
	}
}

int perf_vary(const char *assignment, int argc, char **argv, int nprocs, int nhosts)
{
	if (getenv("TELPHER_RANK") || getenv("OMPI_COMM_WORLD_RANK") || getenv("PMI_RANK"))
		return tool_usage_error("perf", "--vary starts jobs of its own: use it with --np N [--hosts K], not under a launcher");
	char *name = strdup(assignment), *list = name ? strchr(name, '=') : NULL;
	if (!list || list == name || !list[1]) { free(name); return tool_usage_error("perf", "--vary takes NAME=A,B,C, got '%s'", assignment); }
	*list++ = 0;
	if (find_self()) { free(name); return 1; }
	char *values[32], *saved = NULL;
	cJSON *runs[32];
	int n = 0, failed = 0;
	for (char *value = strtok_r(list, ",", &saved); value; value = strtok_r(NULL, ",", &saved)) {
		if (n == 32) { free(name); return tool_usage_error("perf", "--vary takes 32 values at most"); }
		values[n++] = value;
	}
	for (int v = 0; v < n; v++) {
		runs[v] = run_value(name, values[v], argc, argv, nprocs, nhosts);
		failed |= !runs[v] || number(runs[v], "out_of_bounds") != 0;
	}
	print_table(name, values, runs, n);
	for (int v = 0; v < n; v++) cJSON_Delete(runs[v]);
	free(name);
	return failed;
}

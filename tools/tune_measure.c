/* Jobs of `telpher perf`, started by a launcher, their results read back as JSON: parameters are read once in a process's life, so each
 * setting needs processes of its own. Rank 0 writes the file, so it must run where this program runs, or share its TMPDIR. */
#include "tools.h"
#include "coll.h"
#include "tune.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE_FACTOR 8
#define WORDS_MOST 128
#define OUTPUT_MOST 4096        /* of what a job that failed said last */

int tune_sizes(const struct tune_job *job)
{
	int n = 0;
	for (size_t bytes = job->min_bytes; bytes <= job->max_bytes; bytes *= SIZE_FACTOR) n++;
	return n;
}

size_t tune_size(const struct tune_job *job, int i)
{
	size_t bytes = job->min_bytes;
	while (i-- > 0) bytes *= SIZE_FACTOR;
	return bytes;
}

bool tune_open_file(char path[TUNE_PATH], int *fd)
{
	const char *folder = getenv("TMPDIR");
	snprintf(path, TUNE_PATH, "%.200s/telpher-tune-XXXXXX", folder && *folder ? folder : "/tmp");
	*fd = mkostemp(path, O_CLOEXEC);
	if (*fd < 0) fprintf(stderr, "telpher tune: no file can be made as %s: %s\n", path, strerror(errno));
	return *fd >= 0;
}

static char *read_file(int fd, size_t most)
{
	struct stat st;
	if (fstat(fd, &st)) return NULL;
	size_t bytes = (size_t)st.st_size, skipped = bytes > most ? bytes - most : 0;
	char *text = calloc(1, bytes - skipped + 1);
	ssize_t n = text ? pread(fd, text, bytes - skipped, (off_t)skipped) : -1;
	if (n >= 0) return text;
	free(text);
	return NULL;
}

/* LAUNCHER… env SETTINGS… telpher perf …: what the launcher does with its own environment doesn't matter. */
static bool make_words(const struct tune_job *job, enum tp_coll coll, char *const *settings, char *path, char **words)
{
	static char self[4096], min[32], max[32];
	ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
	int n = 0;
	if (length <= 0) { fprintf(stderr, "telpher tune: where this program lies could not be found out\n"); return false; }
	self[length] = 0;
	snprintf(min, sizeof(min), "%zu", job->min_bytes);
	snprintf(max, sizeof(max), "%zu", job->max_bytes);
	for (char *const *w = job->launcher; *w && n < WORDS_MOST / 2; w++) words[n++] = *w;
	words[n++] = "env";
	for (char *const *s = settings; *s && n < WORDS_MOST / 2 + 16; s++) words[n++] = *s;
	char *const perf[] = { self, "perf", (char *)tool_coll_name(coll), "-b", min, "-e", max, "-f", "8", "-c", "0", "-J", path };
	for (size_t i = 0; i < TP_ARRAY_LEN(perf); i++) words[n++] = perf[i];
	words[n] = NULL;
	return true;
}

/* The exit status; what it prints goes to said. */
static int run(char **words, int said)
{
	int status = -1;
	fflush(NULL);
	pid_t pid = fork();
	if (pid == 0) {
		int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
		if (null >= 0) dup2(null, 0);
		dup2(said, 1);
		dup2(said, 2);
		execvp(words[0], words);
		fprintf(stderr, "%s: %s\n", words[0], strerror(errno));
		_exit(127);
	}
	if (pid < 0) return -1;
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR) { }
	return status;
}

static bool read_times(const struct tune_job *job, const char *text, double *us)
{
	cJSON *json = text ? cJSON_Parse(text) : NULL;
	const cJSON *results = cJSON_GetObjectItem(json, "results"), *ranks = cJSON_GetObjectItem(json, "nranks");
	bool good = cJSON_GetArraySize(results) == tune_sizes(job);
	if (!json) fprintf(stderr, "telpher tune: rank 0 wrote no results here; it must run on this machine, or TMPDIR be a folder that both see\n");
	else if (cJSON_GetNumberValue(ranks) != job->nranks) {
		fprintf(stderr, "telpher tune: the job had %g ranks, not the %d of -n\n", cJSON_GetNumberValue(ranks), job->nranks);
		good = false;
	}
	else if (!good) fprintf(stderr, "telpher tune: the job measured %d sizes of %d\n", cJSON_GetArraySize(results), tune_sizes(job));
	for (int i = 0; good && i < tune_sizes(job); i++) {
		const cJSON *sample = cJSON_GetObjectItem(cJSON_GetArrayItem(results, i), "out_of_place");
		us[i] = cJSON_GetNumberValue(cJSON_GetObjectItem(sample, "time_us"));
		good = us[i] > 0;
	}
	cJSON_Delete(json);
	return good;
}

bool tune_measure(const struct tune_job *job, enum tp_coll coll, char *const *settings, double *us)
{
	char path[TUNE_PATH], said_path[TUNE_PATH], *words[WORDS_MOST];
	int file, said;
	bool good = false;
	if (!tune_open_file(path, &file)) return false;
	if (tune_open_file(said_path, &said)) {
		unlink(said_path);
		if (make_words(job, coll, settings, path, words)) {
			int status = run(words, said);
			char *text = read_file(status == 0 ? file : said, status == 0 ? 1 << 20 : OUTPUT_MOST);
			if (status == 0) good = read_times(job, text, us);
			else fprintf(stderr, "%s\ntelpher tune: the job failed (%s %s)\n", text ? text : "", tool_coll_name(coll), *settings ? *settings : "");
			free(text);
		}
		close(said);
	}
	close(file);
	unlink(path);
	return good;
}

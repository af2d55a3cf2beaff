#include <dirent.h>
#include <fcntl.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/helper_base.h"

static char captured[1 << 20];
static int saved_stdout = -1, capture_fd = -1;
static char files[16][64];
static int file_count;

static void remove_files(void)
{
	for (int i = 0; i < file_count; i++)
		unlink(files[i]);
}

void test_clean_environment(void)
{
	for (bool again = true; again;) {
		again = false;
		for (char **e = environ; *e && !again; e++) {
			if (strncmp(*e, "NCCL_", 5) == 0 || strncmp(*e, "TELPHER_", 8) == 0) {
				char name[256];
				snprintf(name, sizeof(name), "%.*s", (int)strcspn(*e, "="), *e);
				unsetenv(name);
				again = true;
			}
		}
	}
	setenv("HOME", "/nonexistent", 1);
	tp_param_reload();
	tp_log_reset();
}

void test_set(const char *name, const char *value)
{
	if (value)
		setenv(name, value, 1);
	else
		unsetenv(name);
	tp_param_reload();
	tp_log_reset();
}

const char *test_file(const char *text)
{
	if (file_count == 0)
		atexit(remove_files);
	assert_true(file_count < 16);
	char *path = files[file_count++];
	strcpy(path, "/tmp/telpher-test-XXXXXX");
	int fd = mkstemp(path);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	close(fd);
	return path;
}

void test_capture_begin(void)
{
	fflush(stdout);
	saved_stdout = dup(STDOUT_FILENO);
	capture_fd = memfd_create("captured", 0);
	/* Appending, as to a log file: several processes may write. */
	fcntl(capture_fd, F_SETFL, O_APPEND);
	dup2(capture_fd, STDOUT_FILENO);
}

const char *test_capture_end(void)
{
	fflush(stdout);
	dup2(saved_stdout, STDOUT_FILENO);
	close(saved_stdout);
	ssize_t n = pread(capture_fd, captured, sizeof(captured) - 1, 0);
	close(capture_fd);
	captured[n > 0 ? n : 0] = 0;
	return captured;
}

bool test_matches(const char *text, const char *regex)
{
	regex_t compiled;
	assert_int_equal(regcomp(&compiled, regex, REG_EXTENDED | REG_NOSUB | REG_NEWLINE), 0);
	bool match = regexec(&compiled, text, 0, NULL, 0) == 0;
	regfree(&compiled);
	if (!match)
		print_message("'%s' doesn't match '%s'\n", text, regex);
	return match;
}

size_t test_count(const char *text, const char *part)
{
	size_t count = 0;
	for (const char *p = text; (p = strstr(p, part)) != NULL; p += strlen(part))
		count++;
	return count;
}

int test_open_fds(void)
{
	int count = 0;
	DIR *dir = opendir("/proc/self/fd");
	assert_non_null(dir);
	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

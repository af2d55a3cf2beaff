/* What the tests of base share: an environment that a test owns, and what was logged. */
#ifndef TP_TEST_HELPER_BASE_H
#define TP_TEST_HELPER_BASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdbool.h>
#include "base/internal.h"

/* No NCCL_* and no TELPHER_* variable, no configuration file of the user; everything is read anew. */
void test_clean_environment(void);
/* Sets (NULL: unsets) a variable; parameters and the log are read anew. */
void test_set(const char *name, const char *value);
/* A temporary file with that text: its path, valid until the end. */
const char *test_file(const char *text);
/* Standard output goes into a file from here on … */
void test_capture_begin(void);
/* … to here; returns what was written since. The text is valid until the next call. */
const char *test_capture_end(void);
/* Does the text match the extended regular expression? */
bool test_matches(const char *text, const char *regex);
size_t test_count(const char *text, const char *part);
int test_open_fds(void);

#endif

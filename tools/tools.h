/* The sub-commands of `telpher`: each takes its own argv (argv[0] is its name) and returns the exit status. */
#ifndef TELPHER_TOOLS_H
#define TELPHER_TOOLS_H

#include <popt.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

int tool_run(int argc, char **argv);
int tool_perf(int argc, char **argv);
int tool_env(int argc, char **argv);
int tool_explain(int argc, char **argv);
int tool_topo(int argc, char **argv);
int tool_calc(int argc, char **argv);
int tool_tune(int argc, char **argv);
int tool_verbs(int argc, char **argv);      /* only where the software card is built */
int tool_probe(int argc, char **argv);      /* only where verbs.h was found */
int tool_rdma_write(int argc, char **argv); /* the program of that name: `telpher probe write` */

#define TOOL_USAGE 2        /* exit status for arguments that make no sense */

/* "64", "4K", "16M", "1G" (powers of 1024). false where the text is no size. */
bool tool_parse_size(const char *text, size_t *out);
/* How ranks are dealt to (virtual) hosts: consecutive ones together, the first hosts one more where it doesn't divide. */
struct tool_place { int host, local, local_size; };
struct tool_place tool_place_of(int rank, int nranks, int nhosts);
/* As poptGetNextOpt, for a context made from this table, whose texts (POPT_ARG_STRING without a value to return) begin as NULL: of one that is given
 * twice the last counts, and the first is freed. */
int tool_next_option(poptContext context, struct poptOption *options);
/* Prints "telpher NAME: …" to stderr and returns TOOL_USAGE. */
int tool_usage_error(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
